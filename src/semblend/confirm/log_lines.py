"""Events as the log lines that a benchmark's summarizer reads, in the wording of each engine.

A format gets only the lines it has; for the rest the answer is None. The line that says "materialized" comes
from `reuse_confirmed` and from nothing else. Ids are percent-encoded, so that none of them can break a line.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal
from urllib.parse import quote

from semblend.confirm.events import Event, EventKind, json_value
from semblend.confirm.receipt import Receipt
from semblend.span import Span

LogFormat = Literal["vllm", "sglang", "trtllm", "lmcache", "semblend"]
Formatter = Callable[[Event], str | None]

# Everything else, above all white space, "=", "," and "%", would let an id imitate a line.
_ID_CHARACTERS = ":/@+-_.~#[]()"


def format_line(event: Event, engine: LogFormat) -> str | None:
    """The line for ``event``, without its line break, or None where this format has no such line.

    >>> from semblend.confirm import events
    >>> format_line(events.donor_registered("r1", "0" * 32, tokens=512, generation=1), "sglang")
    '[FUZZY] register_donor: ok request_id=r1 tokens=512'
    """
    if engine == "semblend":
        return event.to_json_line()
    try:
        formatters = _FORMATS[engine]
    except KeyError:
        known = ", ".join((*_FORMATS, "semblend"))
        raise ValueError(f"no log format {engine!r} (hint: one of {known})") from None
    formatter = formatters.get(event.kind)
    return formatter(event) if formatter else None


class LogSink:
    """Writes events to an engine's log, as far as its format has lines for them."""

    def __init__(self, log: logging.Logger, engine: LogFormat) -> None:
        self._log, self._engine = log, engine

    def emit(self, event: Event) -> None:
        if (line := format_line(event, self._engine)) is not None:
            self._log.info("%s", line)

    def close(self) -> None:
        pass


def _vllm_donor(event: Event) -> str:
    fields = event.fields
    # The line has no way to say "unknown": without a report from the engine it held no blocks for us.
    return (
        f"SemBlend donor registered request_id={_registrant(event)} namespace={fields['namespace']} "
        f"tokens={fields['tokens']} blocks={fields['blocks'] or 0}"
    )


def _vllm_hit(event: Event) -> str | None:
    if not (reusable := event.fields["reusable_tokens"]):
        return None
    return (
        f"SemBlend semantic lookup hit request_id={_id(event.request_id)} donor_id={_ids(event.fields['donor_ids'])} "
        f"similarity={_similarity(event):.4f} kind={_lookup_kind(event)} reusable_tokens={reusable} "
        f"reason={event.fields['reason'] or 'ok'} latency_ms={event.fields['lookup_ms']:.3f}"
    )


def _vllm_planned(event: Event) -> str:
    donors = tuple(span.donor_id for span in event.fields["spans"])
    return (
        f"SemBlend request-local experimental load advertised request_id={_id(event.request_id)} "
        f"donor_id={_ids(donors)} tokens={event.fields['reused_tokens']}"
    )


def _vllm_materialized(event: Event) -> str:
    receipt = _receipt(event)
    return (
        f"SemBlend materialized request_id={_id(receipt.request_id)} donor_id={_ids(receipt.donor_ids)} "
        f"tokens={receipt.reused_tokens}"
    )


def _sglang_donor(event: Event) -> str:
    return f"[FUZZY] register_donor: ok request_id={_registrant(event)} tokens={event.fields['tokens']}"


def _sglang_hit(event: Event) -> str | None:
    if not (reusable := event.fields["reusable_tokens"]):
        return None
    return (
        f"[FUZZY] semantic hit request_id={_id(event.request_id)} similarity={_similarity(event):.4f} "
        f"matched_tokens={reusable}"
    )


def _sglang_materialized(event: Event) -> str:
    receipt = _receipt(event)
    return (
        f"[FUZZY] Realized {receipt.reused_tokens} fuzzy tokens request_id={_id(receipt.request_id)} "
        f"spans={len(receipt.spans)}"
    )


def _trtllm_donor(event: Event) -> str:
    fields = event.fields
    return _audit(
        event,
        "donor_registered",
        donor_id=fields["donor_id"],
        namespace=fields["namespace"],
        token_count=fields["tokens"],
    )


def _trtllm_lookup(event: Event) -> str:
    fields = event.fields
    exact, reusable = fields["exact_tokens"] or 0, fields["reusable_tokens"] or 0
    claimed = 0 if fields["reason"] else reusable
    return _audit(
        event,
        "lookup",
        found=reusable > 0,
        materialization_enabled=not fields["reason"],
        num_computed_tokens=exact,
        num_new_matched_tokens=claimed,
        prefix_token_count=exact + claimed,
        computed_token_count=exact,
        kind=_lookup_kind(event),
        similarity=_similarity(event),
        reuse_ratio=reusable / fields["prompt_tokens"],
        rejection_reason=str(fields["reason"] or ""),
    )


def _trtllm_planned(event: Event) -> str:
    spans, tokens = event.fields["spans"], event.fields["reused_tokens"]
    return _audit(event, "plan_dispatched", kind=_kind(spans), segment_count=len(spans), covered_token_count=tokens)


def _trtllm_materialized(event: Event) -> str:
    receipt = _receipt(event)
    return _audit(
        event,
        "materialized",
        materialized=len(receipt.spans),  # the format's unit is the segment
        kind=_kind(receipt.spans),
        segment_count=len(receipt.spans),
        covered_token_count=receipt.reused_tokens,
        prefix_token_count=receipt.spans[-1].target_end,
        computed_token_count=receipt.exact_tokens,
        requires_rope_correction=any(span.shift for span in receipt.spans),
    )


def _lmcache_stored(event: Event) -> str:
    tokens = event.fields["tokens"]
    return f"Stored {tokens} out of total {tokens} tokens"


def _lmcache_planned(event: Event) -> str | None:
    total, exact, load = (event.fields[name] for name in ("prompt_tokens", "exact_tokens", "reused_tokens"))
    if total is None:
        return None
    computed = exact or 0
    return (
        f"Reqid: {_id(event.request_id)}, Total tokens {total}, Inference Engine computed tokens: {computed}, "
        f"LMCache hit tokens: {computed + load}, need to load: {load}"
    )


def _lmcache_retrieved(event: Event) -> str:
    receipt = _receipt(event)
    return f"Retrieved {receipt.reused_tokens} out of {receipt.prompt_tokens} tokens"


def _error(event: Event) -> str:
    message = json.dumps(event.fields["message"])
    return f"ERROR SemBlend {_id(event.fields['where'])} request_id={_id(event.request_id)} message={message}"


_FORMATS: Mapping[str, Mapping[EventKind, Formatter]] = {
    "vllm": {
        EventKind.DONOR_REGISTERED: _vllm_donor,
        EventKind.LOOKUP: _vllm_hit,
        EventKind.REUSE_PLANNED: _vllm_planned,
        EventKind.REUSE_CONFIRMED: _vllm_materialized,
        EventKind.ERROR: _error,
    },
    "sglang": {
        EventKind.DONOR_REGISTERED: _sglang_donor,
        EventKind.LOOKUP: _sglang_hit,
        EventKind.REUSE_CONFIRMED: _sglang_materialized,
        EventKind.ERROR: _error,
    },
    # An audit file holds JSON objects only, and none of its events is an error.
    "trtllm": {
        EventKind.DONOR_REGISTERED: _trtllm_donor,
        EventKind.LOOKUP: _trtllm_lookup,
        EventKind.REUSE_PLANNED: _trtllm_planned,
        EventKind.REUSE_CONFIRMED: _trtllm_materialized,
    },
    "lmcache": {
        EventKind.DONOR_REGISTERED: _lmcache_stored,
        EventKind.REUSE_PLANNED: _lmcache_planned,
        EventKind.REUSE_CONFIRMED: _lmcache_retrieved,
        EventKind.ERROR: _error,
    },
}


def _audit(event: Event, name: str, **values: Any) -> str:
    record = {"event": name, "time_unix_s": event.time_unix_s, "request_id": event.request_id, **values}
    return json.dumps({key: json_value(value) for key, value in record.items()}, separators=(",", ":"))


def _receipt(event: Event) -> Receipt:
    receipt: Receipt = event.fields["receipt"]
    return receipt


def _similarity(event: Event) -> float:
    """The evidence seen, else the share of the prompt that a donor holds token by token."""
    similarity: float | None = event.fields["similarity"]
    if similarity is None or not math.isfinite(similarity):
        return (event.fields["reusable_tokens"] or 0) / float(event.fields["prompt_tokens"])
    return max(0.0, similarity)  # the readers' number has no sign


def _lookup_kind(event: Event) -> str:
    return "discovery_only" if event.fields["reason"] else "request_local_segmented"


def _kind(spans: tuple[Span, ...]) -> str:
    leading = len(spans) == 1 and spans[0].target_start == 0
    return "request_local_prefix" if leading else "request_local_segmented"


def _registrant(event: Event) -> str:
    return _id(event.request_id or event.fields["donor_id"])


def _ids(names: tuple[str, ...] | None) -> str:
    return ",".join(_id(name) for name in dict.fromkeys(names or ())) or "-"


def _id(name: str | None) -> str:
    return quote(name, safe=_ID_CHARACTERS, errors="backslashreplace") if name else "-"
