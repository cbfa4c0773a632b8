"""Which table the gate of a model goes by, and why: a user's file, else the model's own by its name, else the default.

Decided once, where an engine starts, which says it in one line (`ChosenTable.describe`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from semblend.materialize.gate.plan_shape import PassageOrder
from semblend.materialize.gate.thresholds import DEFAULT, Thresholds, find_known


class TableSource(StrEnum):
    """Where a table comes from."""

    FILE = "calibration file"
    KNOWN = "known model"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class ChosenTable:
    """A table for one model. ``name``: the file, the known model's name, or for the default what nothing is known of.

    ``thresholds`` have a dial for every order in which passages can move: their own, or the default's (decision 0143).
    """

    thresholds: Thresholds
    source: TableSource
    name: str

    @property
    def borrows(self) -> bool:
        """Whether passages that moved are judged by other models' measurements, although this table has its own."""
        return self.source is not TableSource.DEFAULT and bool(self.thresholds.borrowed_dial.means)

    def describe(self) -> str:
        """One line for a log.

        >>> choose_table("unheard-of").describe()
        "default thresholds: no table is known of 'unheard-of' (hint: semblend calibrate measures one)"
        """
        if self.source is TableSource.DEFAULT:
            return f"default thresholds: no table is known of {self.name!r} (hint: semblend calibrate measures one)"
        whose = f"thresholds of {self.source} {self.name}" + self._describe_measurement()
        return whose + ("; passages that moved go by the default dial" if self.borrows else "")

    def _describe_measurement(self) -> str:
        measured = self.thresholds.provenance
        facts = [
            f"on {measured['prompts']} prompts" if "prompts" in measured else "",
            f"of {measured['model']}" if "model" in measured else "",
        ]
        said = " ".join(filter(None, facts))
        return f" (measured {said})" if said else ""


def choose_table(*model_names: str, file: str | Path = "") -> ChosenTable:
    """The table of ``file`` where one is given, else of the first name that is known, else the default.

    >>> choose_table("my-model", "Qwen/Qwen2.5-Coder-1.5B-Instruct").name
    'qwen2.5-coder-1.5b'
    """
    if file:
        return ChosenTable(borrow_dial(Thresholds.read(file)), TableSource.FILE, str(file))
    for model_name in model_names:
        if (known := find_known(model_name)) is not None:
            name, table = known
            return ChosenTable(borrow_dial(table), TableSource.KNOWN, name)
    return ChosenTable(DEFAULT, TableSource.DEFAULT, model_names[0] if model_names else "")


def borrow_dial(table: Thresholds) -> Thresholds:
    """The same table; moved passages that its own dial does not know go by the default's, not by thresholds alone."""
    moved = (order for order in PassageOrder if order is not PassageOrder.IN_ORDER)
    if all(table.dial.knows(order) for order in moved):
        return table
    return replace(table, borrowed_dial=DEFAULT.dial)
