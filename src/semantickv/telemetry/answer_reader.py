"""Reads an answer as it passes: when its first token came, and at the end what it says of usage and reuse.

Events are parsed only until the first one with content and, at the end, in the last bytes: an answer of 1,000 events
must not cost 1,000 parses.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from semantickv.edge.headers import RawHeaders, find_header
from semantickv.routing.prompt_view import load_json
from semantickv.telemetry.record import EngineReceipt
from semantickv.traces.collection import has_content

TAIL_BYTES = 32 << 10
MOST_WHOLE_BYTES = 1 << 20
MOST_OPENING_BYTES = 64 << 10
_TOLD = (b'"usage"', b'"semblend"', b'"sglext"')


class AnswerReader:
    """Show it every piece with `observe`; ask for `receipt` at the end."""

    def __init__(self, headers: RawHeaders, clock: Callable[[], float] = time.perf_counter) -> None:
        self.received_bytes = 0
        self.first_token_at: float | None = None
        self._clock = clock
        self._is_stream = "event-stream" in find_header(headers, b"content-type")
        self._is_plain = find_header(headers, b"content-encoding") in ("", "identity")
        self._opening = b""
        self._is_opening = self._is_stream and self._is_plain
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def observe(self, piece: bytes) -> None:
        """Take the next bytes."""
        self.received_bytes += len(piece)
        if not self._is_plain:
            return
        if self._is_opening:
            self._look_for_content(piece)
        self._tail.append(piece)
        self._tail_bytes += len(piece)
        most = TAIL_BYTES if self._is_stream else MOST_WHOLE_BYTES
        while len(self._tail) > 1 and self._tail_bytes - len(self._tail[0]) >= most:
            self._tail_bytes -= len(self._tail.popleft())

    def read_receipt(self) -> EngineReceipt:
        """What the answer says of tokens and reuse; empty where it says nothing or was not read."""
        usage: Mapping[str, Any] = {}
        receipt: Mapping[str, Any] = {}
        for value in self._list_objects():
            if isinstance(value.get("usage"), Mapping):
                usage = value["usage"]
            receipt = _find_receipt(value) or receipt
        return EngineReceipt.read(usage, receipt)

    def _list_objects(self) -> Iterator[Mapping[str, Any]]:
        data = b"".join(self._tail)
        if not self._is_stream:
            texts = [data] if self.received_bytes <= MOST_WHOLE_BYTES else []
        else:
            texts = [line[5:] for line in data.split(b"\n") if line.startswith(b"data:")]
        for text in texts:
            if not any(word in text for word in _TOLD):
                continue
            value = _parse(text)
            if value is not None:
                yield value

    def _look_for_content(self, piece: bytes) -> None:
        """Note the time of the first event that carries text or a tool call."""
        self._opening += piece
        *lines, self._opening = self._opening.split(b"\n")
        for line in lines:
            value = _parse(line[5:]) if line.startswith(b"data:") else None
            if value is not None and has_content(value):
                self.first_token_at = self._clock()
                self._is_opening, self._opening = False, b""
                return
        if len(self._opening) > MOST_OPENING_BYTES:
            self._is_opening, self._opening = False, b""


def _find_receipt(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What an answer says of reuse: our server under ``semblend``, vLLM with our connector in ``kv_transfer_params``,
    SGLang in ``sglext``, where device, host and storage are told apart."""
    for holder in (value, value.get("kv_transfer_params")):
        if isinstance(holder, Mapping) and isinstance(holder.get("semblend"), Mapping):
            found: Mapping[str, Any] = holder["semblend"]
            return found
    extension = value.get("sglext")
    details = extension.get("cached_tokens_details") if isinstance(extension, Mapping) else None
    if not isinstance(details, Mapping):
        return None
    outside = [details.get(name) or 0 for name in ("host", "storage")]
    return {"exact_tokens": details.get("device"), "external_tokens": sum(one for one in outside if type(one) is int)}


def _parse(text: bytes) -> Mapping[str, Any] | None:
    try:
        value = load_json(text)
    except (ValueError, RecursionError):
        return None  # [DONE], or half an event
    return value if isinstance(value, Mapping) else None
