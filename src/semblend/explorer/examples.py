"""Texts for the explorer's example button: written for this page, free to copy.

Each example is one way in which long prompts repeat themselves and an exact-prefix cache does not notice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

POLICY = """\
Travel and expense policy

1. Booking. Trips are booked through the travel desk at least nine working days before departure. The desk \
compares rail and air; where the train takes less than five hours, the train is the default and needs no \
further approval. Seats are second class on rail and economy in the air, unless the journey lasts more than \
seven hours door to door.

2. Lodging. The company pays for a room up to 145 euros a night, breakfast included, and up to 190 euros in \
Geneva, London and Zurich. A higher price needs a written note from the head of the department before the \
stay, not after it. Private stays with friends or family are thanked with a flat gift of 25 euros a night.

3. Meals. There is no daily allowance. Meals are paid against receipts, up to 42 euros a day, and alcohol is \
never reimbursed. When a customer is invited, the names of all guests and the purpose of the meeting are \
written on the back of the receipt.

4. Getting around. Public transport comes first. Taxis are paid when luggage, late hours or safety make them \
sensible, and the reason is noted in one sentence. A private car is paid at 31 cents a kilometre; parking \
fines and speeding tickets stay with the driver.

5. Settling up. Expenses are filed within twenty days of the return, in one report for the whole trip, with a \
photograph of every receipt. The finance team answers within six working days. Advances that exceed the final \
report are deducted from the next salary.
"""

TIDES = """\
[Passage: the harbour]
The harbour of Sandvik lies at the end of a shallow bay, and its working day follows the water rather than the \
clock. Two hours before high tide the pilot boat leaves the north pier; large vessels may enter only while the \
gauge at the breakwater shows more than six metres. When the wind turns to the west, the swell runs straight \
through the entrance, and the harbour master closes the outer berths until it drops.
"""

CRANES = """\
[Passage: the cranes]
Three cranes stand on the container quay. The oldest was built for timber and still carries a grab; it lifts \
twelve tonnes and is used for bulk cargo only. The two gantry cranes came from a yard that had closed, were \
rebuilt over one winter, and reach across thirteen rows of containers. Each is driven by a crew of two who \
change places every ninety minutes, because the view from the cabin tires the eyes.
"""

RAILWAY = """\
[Passage: the railway]
A single track connects the quay with the main line, four kilometres inland. Six freight trains leave on a \
weekday, none on a Sunday. The gradient behind the town is steep enough that trains of more than nineteen \
wagons need a second engine as far as the summit, and in autumn a sand wagon runs ahead of the first train to \
clear wet leaves from the rails.
"""

ICE = """\
[Passage: the winter]
In four winters out of ten the inner basin freezes. The tug then sails a circle every second hour to keep a \
channel open, and the berths along the warehouse are heated with water from the power station. Ships without \
an ice class wait outside, at the lee of the island, until the channel has been measured and marked with \
spruce branches.
"""

HANDBOOK_INTRO = "You are a careful assistant. Answer from the passages below and name the passage that you used.\n\n"


@dataclass(frozen=True, slots=True)
class ExampleDonor:
    donor_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Example:
    """Donors to register, a prompt to ask with, and what to look for."""

    key: str
    title: str
    about: str
    donors: tuple[ExampleDonor, ...]
    prompt: str


def _apply_edits(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"{old!r} must occur exactly once")
        text = text.replace(old, new)
    return text


EXAMPLES: tuple[Example, ...] = (
    Example(
        key="two-instructions",
        title="Same document, other instruction",
        about="A prefix cache stops at the first differing word. The whole policy behind it is still the same.",
        donors=(
            ExampleDonor(
                "summary-of-policy",
                "Summarise the following policy in five bullet points for new employees.\n\n" + POLICY,
            ),
        ),
        prompt="You audit expense reports. Read the policy, then decide whether a taxi at 23:40 for 38 euros is "
        "covered and quote the rule.\n\n" + POLICY + "\nDecision:",
    ),
    Example(
        key="reordered-passages",
        title="Passages in another order",
        about="Retrieval returns the same passages in another order, from two earlier requests.",
        donors=(
            ExampleDonor(
                "question-about-cranes",
                HANDBOOK_INTRO + TIDES + "\n" + CRANES + "\n" + RAILWAY + "\nQuestion: who drives the cranes?",
            ),
            ExampleDonor(
                "question-about-winter",
                HANDBOOK_INTRO + ICE + "\n" + TIDES + "\nQuestion: what happens when the basin freezes?",
            ),
        ),
        prompt=HANDBOOK_INTRO
        + RAILWAY
        + "\n"
        + ICE
        + "\n"
        + CRANES
        + "\nQuestion: can twenty wagons leave the quay on a frosty Sunday?",
    ),
    Example(
        key="three-words",
        title="Three edited words",
        about="Yesterday's document with three words changed: reuse runs up to each edit and goes on behind it.",
        donors=(ExampleDonor("policy-of-last-year", POLICY),),
        prompt=_apply_edits(
            POLICY,
            ("unless the journey lasts more than seven hours", "unless the journey lasts more than eight hours"),
            ("up to 42 euros a day", "up to 48 euros a day"),
            ("within twenty days of the return", "within thirty days of the return"),
        ),
    ),
    Example(
        key="paraphrase",
        title="Same meaning, other words",
        about="It reads alike, yet no long run of tokens is equal. Similar text is evidence, never permission.",
        donors=(ExampleDonor("policy-of-last-year", POLICY),),
        prompt="How we travel\n\nPlease arrange every trip with our travel desk two weeks ahead. Take the train "
        "whenever it gets you there in under five hours. We cover hotel rooms to a ceiling of 145 euros, a bit "
        "more in expensive cities, and anything above that must be agreed on with your manager beforehand. Keep "
        "your receipts: food is refunded up to 42 euros daily, wine and beer are not. Use buses and trams where "
        "you can, and explain in a sentence why you needed a cab. Hand in your report no later than three weeks "
        "after you are back.",
    ),
)


def as_json() -> list[dict[str, Any]]:
    return [asdict(example) for example in EXAMPLES]
