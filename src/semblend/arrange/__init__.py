"""Passages that commute: put them in the order in which earlier prompts had them, so that reuse is exact or easy.

Answers move as much when passages change places in a cold prompt as through reuse, and a caller often does not care for
the order. Whoever says so gets an order whose beginning lies in an exact prefix cache, and whose rest stands as in one
earlier prompt. Nothing moves without being asked. Beside it: repeats of a passage become references to it
(`replace_repeats`), volatile fields that break prefixes are found in a log (`find_volatile_fields`), and an agent's
history is shortened in batches (`HistoryEditor`).

>>> from semblend.arrange import Arranger
>>> arranger = Arranger()
>>> first = arranger.arrange(["alpha", "beta", "gamma"])
>>> first.order
(0, 1, 2)
>>> arranger.record(first)
>>> arranger.arrange(["delta", "gamma", "alpha"]).order  # alpha began the earlier prompt, nobody has seen delta
(2, 1, 0)
"""

from semblend.arrange.arranger import Arrangement, Arranger, Expected
from semblend.arrange.groups import (
    ArrangedGroup,
    ArrangedMessages,
    ArrangedParts,
    arrange_messages,
    arrange_parts,
)
from semblend.arrange.history import EditedHistory, EditOutcome, HistoryEdit, HistoryEditor
from semblend.arrange.hygiene import VolatileField, find_volatile_fields, move_to_end
from semblend.arrange.marks import PassageGroup
from semblend.arrange.memory import Sent
from semblend.arrange.order_limits import OrderLimits
from semblend.arrange.repeats import Deduplicated, Reference, replace_repeats

Keep = OrderLimits  # its name before; one release longer

__all__ = [
    "ArrangedGroup",
    "ArrangedMessages",
    "ArrangedParts",
    "Arrangement",
    "Arranger",
    "Deduplicated",
    "EditOutcome",
    "EditedHistory",
    "Expected",
    "HistoryEdit",
    "HistoryEditor",
    "Keep",
    "OrderLimits",
    "PassageGroup",
    "Reference",
    "Sent",
    "VolatileField",
    "arrange_messages",
    "arrange_parts",
    "find_volatile_fields",
    "move_to_end",
    "replace_repeats",
]
