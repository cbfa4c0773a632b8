"""The audit stream of an engine or a connector, joined to requests by id.

Two dialects are read: the events of this project (a ``receipt`` inside) and those of connectors that tell advertising,
allocation and materialization apart. Engines put words around the id that a client sent, so ids are compared without
the usual prefixes and suffixes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sembench.files import open_text, read_count, read_float
from sembench.result import RequestRecord
from semblend.errors import InputError

CLOCK_SLACK_S = 60.0
"""Clocks of two machines differ, and engines write a moment later."""
_PREFIX = re.compile(r"^(?:chatcmpl-|cmpl-|gen-|req-)+")
_SUFFIX = re.compile(r"-\d+$")
_ADVERTISED = ("semantic_span_load_advertised", "request_only_load_advertised", "exact_prefix_load_advertised")
_MATERIALIZED = ("runtime_materialized", "materialized")


@dataclass(slots=True)
class AuditLog:
    """The events of an audit stream by request id."""

    by_request: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    lines: int = 0

    @classmethod
    def read(cls, paths: Iterable[str]) -> AuditLog:
        """Read audit files. A last line that was cut off is left out; any other bad line is an error."""
        log = cls()
        for path in paths:
            log._read_file(path)
        return log

    def find_events(self, ids: Iterable[str]) -> Sequence[Mapping[str, Any]]:
        """Return the events of the request that has one of these ids."""
        for name in ids:
            for spelled in dict.fromkeys((name, strip_id(name))):
                if spelled in self.by_request:
                    return self.by_request[spelled]
        return ()

    def _read_file(self, path: str) -> None:
        with open_text(path) as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    event = json.loads(line)
                except ValueError:
                    if not line.endswith("\n"):
                        continue  # the last line is still being written
                    raise InputError(
                        f"{path} line {number} is not JSON", hint="pass the audit stream, one JSON object a line"
                    ) from None
                if isinstance(event, dict):
                    self._keep(event)

    def _keep(self, event: Mapping[str, Any]) -> None:
        self.lines += 1
        names = event.get("request_ids") if isinstance(event.get("request_ids"), list) else [event.get("request_id")]
        for name in names or ():
            if isinstance(name, (str, int)) and str(name):
                for spelled in dict.fromkeys((str(name), strip_id(str(name)))):
                    self.by_request.setdefault(spelled, []).append(event)


def strip_id(request_id: str) -> str:
    """Return a request id without the prefixes and suffixes that engines add.

    >>> strip_id("chatcmpl-abc-0")
    'abc'
    """
    return _SUFFIX.sub("", _PREFIX.sub("", request_id))


def join_all(records: Sequence[RequestRecord], log: AuditLog, block_size: int) -> list[RequestRecord]:
    """Join every record to the events of its own request.

    A name that the server gave to more than one request joins nothing: it may as well be another run's.
    """
    uses = Counter(name for record in records for name in _list_names(record))
    return [
        join_audit(record, log, block_size, [name for name in _list_names(record) if uses[name] == 1])
        for record in records
    ]


def _list_names(record: RequestRecord) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys((*record.request_ids, *([record.engine_request_id] if record.engine_request_id else [])))
    )


def join_audit(record: RequestRecord, log: AuditLog, block_size: int, ids: Sequence[str] = ()) -> RequestRecord:
    """Return the record with what the audit stream says about it; contradictions with the receipt are noted.

    Events from outside the time of the request are another run's and are not joined.
    """
    events = [event for event in log.find_events(ids or _list_names(record)) if _is_in_time(event, record)]
    if not events:
        return replace(record, audit_joined=False)
    reused = _count_reused(events)
    contradictions = list(record.contradictions)
    if reused is not None and record.reused_tokens is not None and reused != record.reused_tokens:
        contradictions.append(f"the audit stream says {reused} reused tokens, the receipt {record.reused_tokens}")
    confirmed = record.backend_confirmed_tokens
    if reused is not None:
        must_not = record.negative_control or record.cross_tenant
        confirmed = reused if confirmed is None else (max if must_not else min)(confirmed, reused)
    advertised = _find_last(events, _ADVERTISED)
    target = None if advertised is None else read_count(advertised.get("target_start"))
    boundary = None if advertised is None else read_count(advertised.get("boundary"))
    sources = record.confirmation_sources
    return replace(
        record,
        backend_confirmed_tokens=confirmed,
        backend_confirmed_blocks=None if confirmed is None else confirmed // block_size,
        reused_tokens=record.reused_tokens if record.reused_tokens is not None else reused,
        confirmation_sources=(*sources, "audit") if reused is not None and "audit" not in sources else sources,
        contradictions=tuple(contradictions),
        external_confirmed_tokens=reused if reused is not None else record.external_confirmed_tokens,
        external_confirmed_tokens_source="connector_audit" if reused is not None else None,
        audit_joined=True,
        audit_observed_boundary=boundary,
        audit_advertised_tokens=None if advertised is None else read_count(_read_tokens(advertised)),
        audit_advertised_target_start=target,
        audit_boundary_at_span_start=None if boundary is None or target is None else boundary == target,
        audit_load_allocated=_has_event(events, "load_allocated") if advertised is not None else None,
        audit_materialized=reused > 0 if reused is not None else (False if advertised is not None else None),
        audit_declined_reasons=_list_reasons(events),
    )


def _is_in_time(event: Mapping[str, Any], record: RequestRecord) -> bool:
    at = read_float(event.get("time_unix_s"))
    if at is None or record.sent_unix_s is None or record.finished_unix_s is None:
        return True
    return record.sent_unix_s - CLOCK_SLACK_S <= at <= record.finished_unix_s + CLOCK_SLACK_S


def _count_reused(events: Iterable[Mapping[str, Any]]) -> int | None:
    """Count the tokens that the stream says were moved: 0 if the request was declined, None if it says nothing.

    One load said twice (by two ranks, in a stream collected twice) has the same donor and length and counts once.
    """
    found: int | None = None
    seen: set[tuple[object, ...]] = set()
    for event in events:
        receipt = event.get("receipt")
        if isinstance(receipt, dict):
            found = read_count(receipt.get("reused_tokens"))
        elif event.get("event") in _MATERIALIZED:
            load = (event.get("donor_id"), event.get("kind"), event.get("target_start"), _read_tokens(event))
            moved = (
                (read_count(_read_tokens(event)) or 0) if event.get("materialized", True) and load not in seen else 0
            )
            seen.add(load)
            found = (found or 0) + moved
        elif event.get("event") in ("runtime_materialization_declined", "reuse_declined", "fallback"):
            found = found or 0
    return found


def _read_tokens(event: Mapping[str, Any]) -> Any:
    return next((event[name] for name in ("tokens", "token_count", "covered_token_count") if name in event), None)


def _find_last(events: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> Mapping[str, Any] | None:
    return next((event for event in reversed(events) if event.get("event") in kinds), None)


def _has_event(events: Iterable[Mapping[str, Any]], kind: str) -> bool:
    return any(event.get("event") == kind for event in events)


def _list_reasons(events: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    named = (event.get("declined_reason") or event.get("rejection_reason") or event.get("reason") for event in events)
    return tuple(dict.fromkeys(str(reason) for reason in named if reason))
