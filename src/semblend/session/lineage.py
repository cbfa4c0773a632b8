"""Which donor holds what an earlier request was, by the name that its caller knows.

A conversation's turns are one donor, whose name changes with every turn that is kept. Callers name the request that
they have edited; from there the names lead on to the donor of today.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable

MAX_NAMES = 1 << 14
_SUFFIXES = re.compile(r"-[0-9a-f]{8}$"), re.compile(r"-\d+$")
"""What an engine may put behind the id that it tells a caller: which prompt of several it is, and random digits."""


class Lineage:
    """Names, each with the next one; the oldest are forgotten.

    >>> lineage = Lineage()
    >>> lineage.note("turn-1", "donor-1"); lineage.note("donor-1", "donor-2")
    >>> lineage.find("turn-1", lambda donor_id: donor_id == "donor-2")
    'donor-2'
    """

    def __init__(self, most: int = MAX_NAMES) -> None:
        self._most = most
        self._next: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._next)

    def note(self, name: str, donor_id: str) -> None:
        """A donor holds all that stood under a name: a request's, or that of a donor which is gone."""
        for alias in (name, *list_told_names(name)):
            if alias != donor_id:
                self._next[alias] = donor_id
                self._next.move_to_end(alias)
        while len(self._next) > self._most:
            self._next.popitem(last=False)

    def find(self, name: str, is_there: Callable[[str], bool]) -> str | None:
        """The donor that holds what stood under a name; None where nobody knows, or it is gone."""
        seen: set[str] = set()
        while name and name not in seen:
            if is_there(name):
                return name
            seen.add(name)
            name = self._next.get(name, "")
        return None


def list_told_names(request_id: str) -> list[str]:
    """What a caller may have been told of an engine's request id.

    >>> list_told_names("cmpl-7f-0-1a2b3c4d"), list_told_names("chatcmpl-7f")
    (['cmpl-7f-0', 'cmpl-7f'], [])
    """
    names = []
    for suffix in _SUFFIXES:
        shorter = suffix.sub("", request_id)
        if shorter != request_id:
            names.append(request_id := shorter)
    return names
