"""Writes documents of any length, for the profile synthetic-v1 and for distractors.

Sentences are drawn from frames and filled with names, places, goods and numbers. Every frame has slots a few words
apart, so that two documents share words and forms, as real ones do, but hardly ever a run of 32 tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sembench.manifests.portable_random import PortableRandom

_FIRST = (
    "Adela", "Bastian", "Carys", "Dmitri", "Elif", "Fergus", "Giulia", "Hamza", "Ingrid", "Jonas", "Katya",
    "Leandro", "Mireille", "Nils", "Oriana", "Pavel", "Quentin", "Rukmini", "Soren", "Tamsin", "Ulrike", "Viggo",
    "Wanda", "Xenia",
)  # fmt: skip
_LAST = (
    "Abara", "Brandt", "Castellan", "Duquesne", "Eklund", "Farrow", "Gallimore", "Hoxha", "Iversen", "Jankovic",
    "Kiplagat", "Lindqvist", "Mbeki", "Novotny", "Ostrander", "Pellegrin", "Quispe", "Rautio", "Salazar",
    "Thorne", "Uchida", "Vasko", "Wexford", "Yilmaz", "Zoric",
)  # fmt: skip
_PLACE = (
    "Arkley", "Birchover", "Caldmoor", "Dunwater", "Eastmere", "Fallow End", "Garnet Bay", "Hollin", "Ironside",
    "Juniper Hill", "Kelby", "Langmead", "Marrow Point", "Netherby", "Oxbow", "Pinder's Reach", "Quarry Lane",
    "Redmarsh", "Stonegate", "Thistle Row", "Underfell", "Vane Street", "Withy Bridge", "Yarrow",
)  # fmt: skip
_THING = (
    "copper wire", "rye flour", "roof slate", "lamp glass", "printed forms", "spare bearings", "cotton sacks",
    "seed potatoes", "window frames", "tinned fish", "bolts", "paper rolls", "garden tools", "paint",
    "medicine chests", "bicycle tyres", "oak planks", "salt", "wool blankets", "clock parts", "school chairs",
    "pump seals", "candles", "maps",
)  # fmt: skip
_BODY = (
    "the harbour office", "the audit board", "the water council", "the carriers' guild", "the transport desk",
    "the night shift", "the regional court", "the insurers", "the weights inspector", "the mayor's clerk",
    "the repair workshop", "the customs house", "the planning group", "the storekeepers", "the examiners",
)  # fmt: skip
_TIME = (
    "on a wet Monday", "before the thaw", "after the audit", "in the last week of June", "during the strike",
    "a day later than promised", "at the spring meeting", "shortly before noon", "in the third quarter",
    "by lamplight", "without notice", "on the eve of the fair", "within the hour", "at the second reading",
    "ahead of the storm",
)  # fmt: skip
_FRAMES = (
    "{time}, {name} counted {n} crates of {thing} at {place} and wrote {n} into the ledger.",
    "{body} asked {name} why {thing} worth {n} crowns had left {place} {time}.",
    "A delivery of {n} kilograms of {thing} reached {place}, where {name} signed for {n} of them.",
    "{name} and {name} disagreed about {n} crates of {thing} until {body} settled the matter {time}.",
    "Between {place} and {place} the road was closed for {n} days, so {thing} went by water {time}.",
    "{body} fined the depot at {place} {n} crowns, which {name} paid {time}.",
    "Of {n} samples of {thing} taken at {place}, {name} found {n} below the mark.",
    "The contract with {name} covers {n} loads of {thing} a month and ends {time}, unless {body} objects.",
    "{name} moved from {place} to {place} {time} and took over {n} accounts from {name}.",
    "Prices for {thing} rose to {n} crowns at {place}, as {name} had warned {body} {time}.",
    "{body} keeps {n} files on {thing}; {name} has read number {n} twice.",
    "A fire at {place} {time} spoiled {n} sacks of {thing}, said {name}, but not the other {n}.",
    "{name} measured {n} millimetres where the drawing of {place} shows {n}.",
    "In the report to {body}, {name} names {place} first, {place} second and {thing} not at all.",
    "For {thing} the scale at {place} shows {n}; the one that {name} brought {time} shows {n}.",
    "{body} met {time} and gave {name} {n} votes, against {n} for {name}.",
    "Nobody at {place} had ordered {thing}, yet {n} boxes stood there {time} with {name} on the label.",
    "{name} rents shed {n} at {place} from {body} and stores {thing} in it {time}.",
    "The train to {place} lost {n} minutes {time}; {name} blames {thing}, {body} blames {name}.",
    "Invoice {n} lists {thing} for {place}, and invoice {n}, found by {name}, lists it again.",
)
_SLOT = re.compile(r"\{(\w+)\}")
_SENTENCES_A_PARAGRAPH = 6
_WORDS_A_SENTENCE = 19


@dataclass(frozen=True, slots=True)
class WrittenDocument:
    """A made-up document and the three (question, answer) pairs that it contains."""

    context: str
    facts: tuple[tuple[str, str], ...]


def write_document(seed: object, words: int = 800) -> WrittenDocument:
    """Return a document of about ``words`` words; the same seed gives the same text everywhere."""
    rng = PortableRandom("sembench.writer.v1", seed)
    count = max(8, words // _WORDS_A_SENTENCE)
    sentences = [_write_sentence(rng) for _ in range(count)]
    facts = []
    for at, (question, planted, answer) in zip((count // 6, count // 2, count - 2), _plant_facts(rng), strict=True):
        sentences[at] = planted
        facts.append((question, answer))
    paragraphs = [
        " ".join(sentences[start : start + _SENTENCES_A_PARAGRAPH]) for start in range(0, count, _SENTENCES_A_PARAGRAPH)
    ]
    return WrittenDocument("\n\n".join(paragraphs), tuple(facts))


def _plant_facts(rng: PortableRandom) -> tuple[tuple[str, str, str], ...]:
    code, depth, person = str(1000 + rng.draw_below(9000)), str(100 + rng.draw_below(900)), _pick_name(rng)
    place, dock, office = rng.choose(_PLACE), rng.choose(_PLACE), rng.choose(_PLACE)
    return (
        (
            f"What is the access code of the granary at {place}?",
            f"The access code of the granary at {place} was changed to {code} and is known to two people only.",
            code,
        ),
        (
            f"How deep is the basin at {dock}, in centimetres?",
            f"After the dredging the basin at {dock} is {depth} centimetres deep at low water.",
            depth,
        ),
        (
            f"Who was elected warden at {office}?",
            f"The warden elected at {office} for the coming year is {person}, by a show of hands.",
            person,
        ),
    )


def _write_sentence(rng: PortableRandom) -> str:
    text = _SLOT.sub(lambda found: _fill(found.group(1), rng), rng.choose(_FRAMES))
    return text[0].upper() + text[1:]


def _fill(slot: str, rng: PortableRandom) -> str:
    if slot == "n":
        return f"{12 + rng.draw_below(9_988):,}"
    if slot == "name":
        return _pick_name(rng)
    return rng.choose({"place": _PLACE, "thing": _THING, "body": _BODY, "time": _TIME}[slot])


def _pick_name(rng: PortableRandom) -> str:
    return f"{rng.choose(_FIRST)} {rng.choose(_LAST)}"
