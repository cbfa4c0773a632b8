"""Texts of the demo, written for it, and a chronicle that goes on as long as it is asked to."""

from __future__ import annotations

import random
from collections.abc import Iterator

LIGHTHOUSE = """\
Handbook of the Corran lighthouse

The lighthouse stands on a low rock two miles off the coast and has been kept without a break since 1871. Its tower \
is thirty-four metres high, built of grey granite that was cut on the mainland, numbered, and shipped over in a \
single summer. Inside, a stair of one hundred and ninety-two steps leads past the oil store, the kitchen and the \
two bedrooms up to the lantern. The keepers say that a cup filled to the brim in the kitchen arrives half empty at \
the top.

The lamp is lit half an hour before sunset and put out when a newspaper can be read on the gallery. It gives two \
white flashes every fifteen seconds. In fog the lamp is of little use, and the horn takes over: one long blast each \
minute, for as long as the fort on the opposite shore cannot be seen. A keeper who forgets the horn pays for a \
round of tea when the relief boat comes.

The relief boat is called the Marigold. She leaves the harbour on the first and third Tuesday of the month, weather \
permitting, and brings water, coal, mail and one fresh keeper. Nobody has to stay longer than six weeks, although \
the winter of 1947 kept three men on the rock for eleven. Since then the store holds food for ninety days, and the \
flour is turned every Friday so that it does not set.

Visitors are welcome from May to September. They sign the book at the landing, leave their sticks and umbrellas in \
the porch, and do not touch the lens, which was ground in Paris and cannot be replaced. Children may ring the bell \
once.
"""

LEASE = """\
Agreement on the use of the old mill at Haverbrook

The owner, Mrs Odile Marten, lets the old mill with its yard, its weir and the orchard behind it to the Haverbrook \
Bread Society. The agreement begins on the first of April and runs for twelve years. Either side may end it earlier \
with a notice of nine months, given in writing and handed over in the presence of a witness.

The rent is 640 crowns a month, paid on the fifth day. In years when the stream falls below the painted mark for \
more than forty days, the rent of those months is halved, because a mill without water is only a cold house. The \
society pays for flour sacks, lamp oil and the chimney sweep; the owner pays for the roof, the wheel and the \
insurance.

The society keeps the sluice clear of branches and opens it whenever the bell of the upper village rings twice. It \
may bake on every day but Sunday, beginning no earlier than four in the morning. Carts wait in the yard and not on \
the bridge, which carries no more than three tonnes. The cat of the miller stays in the house and is fed by the \
society.

The access code of the granary is 4917, and it is changed whenever a member leaves. Two keys exist to the front \
door: one is kept by the baker, the other by the teacher, who lives across the road and is almost always at home. A \
lost key is reported on the same day. The society may plant what it likes in the orchard, except walnut trees, \
whose shade the owner dislikes. What is planted stays when the agreement ends.

Quarrels are brought first to the mayor, then to the court in Lindau, and in no case to the newspaper.
"""

ORCHESTRA = """\
Notes on the river orchestra. The river orchestra has forty-one players and no conductor. It was founded by \
ferrymen who had to wait for the ice to break and owned more violins than books. Rehearsals take place on a barge \
that is moored below the customs house; when the current is strong the cellists sit along the keel. The leader of \
the second violins, Tamsin Oake, chooses the programme by drawing cards, and whoever complains has to carry the \
drums. On midsummer night the barge is cast off at ten and drifts through the town while the orchestra plays, and \
every bridge throws down flowers, bread, and once a live goose, which was adopted and is listed as a member of the \
brass.
"""

GLASSWORKS = """\
Notes on the glassworks. The glassworks at Penrow melts sand from its own beach, which contains so much iron that \
every bottle is green. The furnace has burned since the spring of 1958 and is relit by a schoolchild whenever it \
has to be rebuilt, about once in eleven years. A team is made of five: the gatherer, the blower, the servitor, the \
boy with the paddle and the one who sings, because the breath of the blower follows the song. The foreman, Ruben \
Asker, keeps the recipes in a tin box and has taught them to two people only. Broken glass is paid for by weight, \
and nothing is thrown away: the windows of the chapel are made of eighty years of mistakes.
"""

BEES = """\
Notes on the town bees. The town keeps sixty hives on the roof of the library, where the lime trees of four avenues \
come within reach. The beekeeper, Ilse Varga, is paid in honey and in the right to close the reading room when a \
swarm is on the move. In June a hive gives nineteen kilos; in a wet year it gives six, and the marmalade makers are \
called in to fill the jars. Smoke is never used, since the books would smell of it. Instead the keeper hums, and \
she says that the bees mind the pitch more than the volume. Stings are entered in the register of loans and are due \
back in two weeks.
"""

EXPEDITION = """\
Plan of the glacier walk

The party meets at the Hut of the Three Larches on the evening before and starts at four in the morning, while the \
snow is hard. It has eight members on two ropes. The guide is Marta Lindqvist, who has crossed the glacier more \
than fifty times; the second rope is led by her brother. Each rope carries two ice screws, a stove, and a red flag \
on a pole.

The way leads along the moraine to the second cairn, then straight across to the black island, which is reached \
before nine or not at all. Lunch is eaten there, standing. The descent follows the stream. Whoever loses a glove \
says so at once and gets another from the guide, who carries four spare pairs. If the cloud comes down, everyone \
sits still until the flag can be seen, and songs are sung so that nobody falls asleep. The bus back to the valley \
leaves at half past six.
"""

_WHO = (
    "The harbour clerk", "A retired surveyor", "The youngest apprentice", "Our neighbour", "The postmistress",
    "A visitor from the south", "The night watchman", "The choir", "Somebody's uncle", "The carpenter's daughter",
    "The vet", "A party of geologists", "The new teacher", "The ferryman", "An inspector of weights",
)  # fmt: skip
_DID = (
    "repaired", "counted", "painted", "carried away", "measured", "borrowed", "returned", "polished", "sketched",
    "weighed", "sold", "unpacked", "drew a map of", "asked about", "took apart and reassembled", "quietly replaced",
)  # fmt: skip
_WHAT = (
    "the brass telescope", "seven barrels of tar", "the eastern fence", "a crate of lemons", "the clock above the gate",
    "an upright piano", "the winter curtains", "the ledger of last year", "a model of the bridge", "three wet sails",
    "the weather vane", "the old signal lamp", "a basket of eels", "the notice board", "half of the chairs",
)  # fmt: skip
_WHERE = (
    "behind the smithy", "on the upper landing", "near the ford", "in the shed with the blue door", "under the arcade",
    "beside the pump", "at the far end of the quay", "in the cellar", "opposite the bakery", "on the parish green",
)  # fmt: skip
_SKY = (
    "The wind came from the north-west and dropped at noon.", "Rain fell until the evening.",
    "It was warm for the season.", "Fog lay over the meadows all day.", "The first frost was seen on the roofs.",
    "Clear sky, no wind.",
    "A short storm broke two branches.", "The barometer rose slowly.", "Hail for ten minutes, then sun.",
)  # fmt: skip
_AFTER = (
    "It took {n} hours and nobody was thanked.", "The bill came to {n} shillings.", "{n} people stood and watched.",
    "The work will be finished in {n} days.", "By the count of the clerk, {n} pieces are missing.",
    "This was the {n}th time since the fair.", "A dog was blamed; {n} witnesses disagree.",
)  # fmt: skip


def chronicle(seed: int, words: int) -> str:
    """About ``words`` words of a daybook; the same for a seed, always, and for another seed another.

    >>> chronicle(1, 40) == chronicle(1, 40) != chronicle(2, 40)
    True
    """
    lines, count = ["From the daybook", ""], 0
    for entry in _entries(seed):
        lines.append(entry)
        count += len(entry.split())
        if count >= words:
            break
    return "\n".join(lines) + "\n"


def lengthened(text: str, seed: int, words: int) -> str:
    """``text`` and, where it has fewer than ``words`` words, a chronicle behind it."""
    lacking = words - len(text.split())
    return f"{text}\n{chronicle(seed, lacking)}" if lacking > 0 else text


def _entries(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    day = rng.randint(1, 40)
    while True:
        day += rng.randint(1, 3)
        what = rng.sample(_WHAT, 2)
        who = rng.sample(_WHO, 2)
        yield (
            f"Day {day}. {rng.choice(_SKY)} {who[0]} {rng.choice(_DID)} {what[0]} {rng.choice(_WHERE)}. "
            f"{rng.choice(_AFTER).format(n=rng.randint(2, 60))} "
            f"{who[1]} {rng.choice(_DID)} {what[1]} {rng.choice(_WHERE)}."
        )
