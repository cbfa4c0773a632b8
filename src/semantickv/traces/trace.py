"""A serving trace as arrays: which blocks every request asked for, in which order, and when.

A trace comes from a file (`semantickv.traces.formats`) or from `TraceRequest` values made by a generator. The simulator
never sees text: a block is an integer id, its number of tokens and the name of its semantic type.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from semantickv.traces.engine_logs import TraceRequest
from semantickv.traces.formats import FORMATS_WITHOUT_CONTENT, TraceFile
from semblend.errors import InputError

BLOCK_TYPES: Final = (
    "system",
    "user",
    "retrieved_context",
    "tool_output",
    "assistant",
    "template",
    "code",
    "legal_evidence",
    "other",
)

__all__ = ["BLOCK_TYPES", "Trace", "TraceBuilder", "TraceRequest"]

IntArray = npt.NDArray[np.integer[Any]]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival; the blocks of request ``r`` are ``ids[starts[r]:starts[r + 1]]``.

    ``chained`` says that an id already stands for the block *and everything before it* (Mooncake, Bailian). Such a
    trace cannot show what reuse independent of position would add, and block mode over it is a lower bound of it.
    """

    ids: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    types: npt.NDArray[np.int16]
    starts: npt.NDArray[np.int64]
    arrival_s: FloatArray
    tenant: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    ttft_ms: FloatArray  # nan where it was not observed, as the next one
    computed_tokens: FloatArray  # of the prompt, by the engine
    type_names: tuple[str, ...]
    tenant_names: tuple[str, ...]
    name: str = "trace"
    format: str = "requests"
    skipped: int = 0
    chained: bool = False
    engine_hit_rate: float | None = None  # what the engine says of the whole file; None where it does not
    request_ids: tuple[str, ...] = field(default=(), repr=False)
    sessions: tuple[str, ...] = field(default=(), repr=False)

    @property
    def holds_content(self) -> bool:
        """Whether ids say which blocks are equal; a trace of lengths alone gives every block an id of its own."""
        return self.format not in FORMATS_WITHOUT_CONTENT

    @staticmethod
    def from_requests(requests: Iterable[TraceRequest], name: str = "trace") -> Trace:
        """Build the trace of these requests, which must come in order of arrival."""
        builder = TraceBuilder(name=name, format="requests")
        for request in requests:
            builder.add(request)
        return builder.build()

    @staticmethod
    def read(
        path: str | os.PathLike[str],
        format: str = "auto",
        block_tokens: int | None = None,
        skip_bad: bool = False,
        sort: bool = False,
    ) -> Trace:
        """Read a trace file (plain or gzip) in one of `semantickv.traces.formats.FORMATS`; ``auto`` detects which.

        ``sort`` accepts lines in any order of time; ``skip_bad`` skips and counts lines that cannot be used.
        """
        file = TraceFile(path, format, block_tokens=block_tokens, skip_bad=skip_bad, any_order=sort)
        builder = TraceBuilder(file.name, file.format, chained=file.chained, sort=sort)
        for request in file.read_requests():
            builder.add(request)
        return replace(builder.build(), skipped=file.skipped, engine_hit_rate=file.engine_hit_rate)

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.arrival_s)

    @property
    def block_accesses(self) -> int:
        """Number of block accesses of all requests."""
        return len(self.ids)

    @cached_property
    def request(self) -> npt.NDArray[np.int32]:
        """For every block access, the number of its request."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.starts))

    @cached_property
    def place(self) -> npt.NDArray[np.int32]:
        """For every block access, its index inside its request."""
        counts = np.diff(self.starts)
        return (np.arange(len(self.ids), dtype=np.int64) - np.repeat(self.starts[:-1], counts)).astype(np.int32)

    @cached_property
    def request_tokens(self) -> npt.NDArray[np.int64]:
        """Prompt tokens of every request."""
        total = np.concatenate(([0], np.cumsum(self.tokens, dtype=np.int64)))
        return total[self.starts[1:]] - total[self.starts[:-1]]

    def iter_requests(self) -> Iterator[TraceRequest]:
        """Yield the requests as values: for tests, exporters and people."""
        for r in range(len(self)):
            blocks = slice(self.starts[r], self.starts[r + 1])
            yield TraceRequest(
                self.request_ids[r] if self.request_ids else str(r),
                float(self.arrival_s[r]),
                tuple(map(int, self.ids[blocks])),
                tuple(map(int, self.tokens[blocks])),
                tuple(self.type_names[kind] for kind in self.types[blocks]),
                int(self.output_tokens[r]),
                self.tenant_names[self.tenant[r]],
                self.sessions[r] if self.sessions else "",
                *(None if np.isnan(value[r]) else float(value[r]) for value in (self.ttft_ms, self.computed_tokens)),
            )

    def take_first(self, requests: int) -> Trace:
        """Return the first ``requests`` requests, as views."""
        return self._cut(0, min(requests, len(self)))

    def skip_first(self, first: int) -> Trace:
        """Return the requests from number ``first`` on, as views."""
        return self._cut(min(first, len(self)), len(self))

    def _cut(self, low: int, high: int) -> Trace:
        """Return the requests from number ``low`` up to ``high``."""
        first, last = int(self.starts[low]), int(self.starts[high])
        return self.select(slice(first, last), slice(low, high), self.starts[low : high + 1] - first)

    def select(self, accesses: Any, requests: slice | IntArray, starts: npt.NDArray[np.int64]) -> Trace:
        """Build the trace of some block accesses and requests; ``starts`` are those of the new trace.

        ``accesses`` is anything that indexes an array; ``requests`` is a slice or the numbers of the requests.
        """

        def pick(names: tuple[str, ...]) -> tuple[str, ...]:
            return names[requests] if isinstance(requests, slice) else tuple(names[r] for r in requests if names)

        by_request = ("arrival_s", "tenant", "output_tokens", "ttft_ms", "computed_tokens")
        return replace(
            self,
            starts=starts,
            request_ids=pick(self.request_ids),
            sessions=pick(self.sessions),
            **{name: getattr(self, name)[accesses] for name in ("ids", "tokens", "types")},
            **{name: getattr(self, name)[requests] for name in by_request},
        )


_COLUMNS: Final = {
    "ids": "q", "tokens": "i", "types": "h", "starts": "q", "arrival_s": "d", "tenant": "i", "output_tokens": "i",
    "ttft_ms": "d", "computed_tokens": "d",
}  # fmt: skip
"""The arrays of a trace, by the type codes of `array`."""


class TraceBuilder:
    """Collects requests into flat arrays: ten million blocks take about 140 MB, not gigabytes of objects."""

    def __init__(self, name: str, format: str, *, chained: bool = False, sort: bool = False) -> None:
        self.name, self.format, self.chained, self.sort = name, format, chained, sort
        self._columns: dict[str, Any] = {name: array(code) for name, code in _COLUMNS.items()}
        self._columns["starts"].append(0)
        self._type_numbers = {kind: number for number, kind in enumerate(BLOCK_TYPES)}
        self._tenant_numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._sessions: list[str] = []

    def __len__(self) -> int:
        return len(self._names)

    def add(self, request: TraceRequest) -> None:
        """Add a request; raise InputError if it arrives before the one ahead of it, unless ``sort``."""
        columns, numbers = self._columns, self._type_numbers
        last_s = columns["arrival_s"][-1] if self._names else 0.0
        if not self.sort and request.arrival_s < last_s:
            raise InputError(
                f"request {request.request_id!r} arrives at {request.arrival_s:g} s, before the one ahead of it "
                f"({last_s:g} s)",
                hint="sort the requests by arrival, or read with sort=True",
            )
        columns["ids"].extend(request.block_ids)
        columns["tokens"].extend(request.block_tokens)
        columns["types"].extend([numbers.setdefault(kind, len(numbers)) for kind in request.block_types])
        columns["starts"].append(len(columns["ids"]))
        columns["arrival_s"].append(request.arrival_s)
        columns["tenant"].append(self._tenant_numbers.setdefault(request.tenant, len(self._tenant_numbers)))
        columns["output_tokens"].append(request.output_tokens)
        columns["ttft_ms"].append(np.nan if request.ttft_ms is None else request.ttft_ms)
        columns["computed_tokens"].append(np.nan if request.computed_tokens is None else request.computed_tokens)
        self._names.append(request.request_id)
        self._sessions.append(request.session)

    def build(self) -> Trace:
        """Build the trace of all requests added so far."""
        arrays: dict[str, Any] = {name: np.array(column) for name, column in self._columns.items()}
        trace = Trace(
            **arrays,
            type_names=tuple(self._type_numbers),
            tenant_names=tuple(self._tenant_numbers) or ("default",),
            name=self.name,
            format=self.format,
            chained=self.chained,
            request_ids=tuple(self._names),
            sessions=tuple(self._sessions),
        )
        return _sort_by_arrival(trace) if self.sort else trace


def _sort_by_arrival(trace: Trace) -> Trace:
    """Return the same requests in order of arrival; requests of one moment keep their order."""
    order = np.argsort(trace.arrival_s, kind="stable")
    counts = np.diff(trace.starts)[order]
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    gather = np.repeat(trace.starts[:-1][order] - starts[:-1], counts) + np.arange(starts[-1])
    return trace.select(gather, order, starts)


def describe_trace(trace: Trace) -> dict[str, Any]:
    """Count a trace: its requests, block accesses, distinct blocks, and prompt tokens in all and by type."""
    first = np.unique(trace.ids, return_index=True)[1]
    return {
        "name": trace.name,
        "requests": len(trace),
        "block_accesses": trace.block_accesses,
        "distinct_blocks": len(first),
        "prompt_tokens": int(trace.request_tokens.sum()),
        "distinct_tokens": int(trace.tokens[first].sum(dtype=np.int64)),
        "tokens_by_type": {
            name: int(trace.tokens[trace.types == number].sum(dtype=np.int64))
            for number, name in enumerate(trace.type_names)
            if (trace.types == number).any()
        },
    }
