"""One request of a trace, and the requests that engines log: vLLM, SGLang, LMCache.

As of vLLM 0.32, SGLang 0.5.23 and LMCache 0.5.6. Lines that say nothing about a request are passed over. Tokens are
hashed at once, block by block. What the engine says about its own hits is kept beside the trace.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, Protocol

from semblend.errors import InputError
from semblend.text.block_traces import (
    split_length,
)
from semblend.text.log_formats import BadFieldError, read_records

_VLLM_REQUEST: Final = re.compile(rb"(?:Request (\S+) details:|Received request (\S+):)")
_VLLM_TIME: Final = re.compile(rb" \d\d-\d\d \d\d:\d\d:\d\d ")
_VLLM_LINE: Final = re.compile(rb"(?:INFO|DEBUG|WARNING) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\.py:\d+\]")
_VLLM_RATE: Final = re.compile(rb"Prefix cache hit rate: ([\d.]+)%")
_SGLANG_EVENT: Final = b'"event": "request.'
_SGLANG_BATCH: Final = re.compile(
    rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\] "
    rb"Prefill batch, #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+)"
)
_LMCACHE: Final = re.compile(
    rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d+)\].*?Reqid: ([^,\s]+), Total tokens (\d+),.*?LMCache hit tokens: (\d+)"
)
MAX_KNOWN: Final = 10_000
HEALTH_CHECK: Final = "HEALTH_CHECK"


@dataclass(frozen=True)
class TraceRequest:
    """One request: its blocks from the first to the last, and what is known about it.

    >>> TraceRequest("r1", 0.5, (7, 8), (512, 100), ("system", "user")).tokens
    612
    """

    request_id: str
    arrival_s: float
    block_ids: tuple[int, ...]
    block_tokens: tuple[int, ...]
    block_types: tuple[str, ...]
    output_tokens: int = 0
    tenant: str = "default"
    session: str = ""
    ttft_ms: float | None = None
    computed_tokens: float | None = None

    def __post_init__(self) -> None:
        if not len(self.block_ids) == len(self.block_tokens) == len(self.block_types):
            raise InputError(f"request {self.request_id!r}: ids, tokens and types of its blocks differ in number")
        if not (self.arrival_s >= 0 and math.isfinite(self.arrival_s)):
            raise InputError(f"request {self.request_id!r}: arrival_s must be finite and not negative")
        if any(tokens <= 0 for tokens in self.block_tokens):
            raise InputError(f"request {self.request_id!r}: a block has no tokens", hint="leave empty blocks out")

    @property
    def tokens(self) -> int:
        return sum(self.block_tokens)

    def as_json(self) -> dict[str, Any]:
        """Return the request as a line of a trace in our own format."""
        blocks = zip(self.block_ids, self.block_tokens, self.block_types, strict=True)
        line: dict[str, Any] = {
            "request_id": self.request_id,
            "timestamp_ms": round(self.arrival_s * 1000, 3),
            "session_id": self.session,
            "tenant_id": self.tenant,
            "output_tokens": self.output_tokens,
            "blocks": [
                {"content_hash": number, "semantic_type": kind, "token_count": tokens}
                for number, tokens, kind in blocks
            ],
        }
        return line if self.ttft_ms is None else line | {"observed_ttft_ms": self.ttft_ms}


def cut_into_blocks(token_ids: Sequence[int], block_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cut token ids into blocks; return the id of each block, a hash of its tokens, and its length.

    >>> ids, lengths = cut_into_blocks([1, 2, 3, 1, 2], 3)
    >>> len(set(ids)), lengths
    (2, (3, 2))
    """
    parts = [token_ids[at : at + block_tokens] for at in range(0, len(token_ids), block_tokens)]
    return tuple(map(hash_tokens, parts)), tuple(map(len, parts))


def hash_tokens(token_ids: Sequence[int]) -> int:
    """Hash the tokens of a block to a number of 64 bits that is the same in every run."""
    data = array("q", token_ids).tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


class Parser(Protocol):
    """Turns the lines of a file into requests. ``hint`` says what to do when there was none."""

    hint: str = ""
    time_field: str = "time"
    engine_hit_rate: float | None = None
    left_out: int = 0  # requests that the file names and does not describe

    def parse(self, line: bytes | None, number: int) -> Iterable[TraceRequest]:
        """Parse one line; nothing where it is about no request. Raise `BadFieldError` for one that can't be used."""

    def finish(self) -> Iterable[TraceRequest]:
        """Give what waited for more lines."""
        return ()


class _Clock:
    """Counts the seconds since the first time that was read."""

    def __init__(self) -> None:
        self._begin: float | None = None

    def read(self, text: str) -> float:
        """Read ``2026-11-16 18:13:01`` or ``2026-11-16T18:13:01.083639``; one before the first counts as the first."""
        try:
            moment = datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
        except ValueError:
            raise BadFieldError("timestamp", f"{text!r} is not a time") from None
        self._begin = moment if self._begin is None else self._begin
        return max(0.0, moment - self._begin)


class VllmLog(Parser):
    """vLLM's requests with their tokens. The log has no year and no answers."""

    hint = "start vLLM with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG: only then are tokens logged"

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens, self._clock, self._known = block_tokens, _Clock(), _Known()
        self.left_out = 0

    def parse(self, line: bytes | None, _: int) -> Iterable[TraceRequest]:
        if line is None:
            raise BadFieldError("line", "too long")
        rate = _VLLM_RATE.search(line)
        if rate is not None and b"Engine 0" in line:
            self.engine_hit_rate = float(rate[1]) / 100
            return
        for record in read_records("vllm", line) if b"prompt_token_ids: [" in line else ():
            name, tokens, time = record["request_id"], record.get("token_ids"), record["logged_at"]
            if tokens and time and self._known.add(name):
                yield _build(name, self._clock.read(f"2000-{time}"), tokens, self._block_tokens)


class SglangLog(Parser):
    """SGLang's requests with their tokens; a request waits for its end, which has the length of the answer."""

    hint = "start SGLang with --log-requests --log-requests-level 3 --log-requests-format json"

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens, self._clock, self.left_out = block_tokens, _Clock(), 0
        self._open: OrderedDict[str, TraceRequest] = OrderedDict()
        self._ended: set[str] = set()
        self._prompt = self._cached = 0

    def parse(self, line: bytes | None, _: int) -> Iterable[TraceRequest]:
        if line is None:
            raise BadFieldError("line", "too long")
        if _SGLANG_EVENT not in line:
            return ()
        try:
            record = json.loads(line[line.index(b"{") :])
        except (ValueError, RecursionError) as error:
            raise BadFieldError("line", f"not JSON: {error}") from None
        name = str(record.get("rid"))
        if name.startswith(HEALTH_CHECK) or not isinstance(record.get("obj"), dict):
            return ()
        if record.get("event") == "request.received":
            self._receive(record, name)
        elif record.get("event") == "request.finished" and name in self._open:
            self._end(name, record.get("out"))
        return self._take_ended()

    def _receive(self, record: Mapping[str, Any], name: str) -> None:
        tokens = record["obj"].get("input_ids")
        if not isinstance(tokens, list) or not tokens or not all(type(one) is int for one in tokens):
            self.left_out += 1  # several prompts at once, an image, or a level below 3
            return
        arrival = self._clock.read(str(record.get("timestamp")))
        session = str(record["obj"].get("session_id") or "")
        self._open[name] = replace(_build(name, arrival, tokens, self._block_tokens), session=session)

    def _end(self, name: str, out: Any) -> None:
        meta = out.get("meta_info") if isinstance(out, dict) else None
        if isinstance(meta, dict):
            prompt, cached, answer = (meta.get(key) for key in ("prompt_tokens", "cached_tokens", "completion_tokens"))
            if type(prompt) is int and type(cached) is int:
                self._prompt, self._cached = self._prompt + prompt, self._cached + cached
                self.engine_hit_rate = self._cached / self._prompt if self._prompt else None
            if type(answer) is int and 0 <= answer < 2**31:
                self._open[name] = replace(self._open[name], output_tokens=answer)
        self._ended.add(name)

    def _take_ended(self) -> Iterable[TraceRequest]:
        """Give the requests from the first on that have ended; one that never ends does not hold up the others."""
        while self._open and (next(iter(self._open)) in self._ended or len(self._open) > MAX_KNOWN):
            name, request = self._open.popitem(last=False)
            self._ended.discard(name)
            yield request

    def finish(self) -> Iterable[TraceRequest]:
        yield from self._open.values()
        self._open.clear()


class _Lengths(Parser):
    """Requests of which only the length is known: every block has an id of its own."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens, self._clock, self._fresh = block_tokens, _Clock(), itertools.count()
        self._prompt = self._cached = self.left_out = 0

    def _build(self, name: str, arrival_s: float, length: int, cached: int) -> TraceRequest:
        if not 0 < length < 2**31:
            raise BadFieldError("tokens", f"a prompt of {length} tokens")
        self._prompt, self._cached = self._prompt + length, self._cached + cached
        self.engine_hit_rate = self._cached / self._prompt
        return build_unshared(name, arrival_s, length, self._block_tokens, self._fresh)


class SglangCacheLog(_Lengths):
    """SGLang's prefill batches; a batch of several prompts counts as so many of its mean length."""

    hint = "an SGLang log has lines that begin with: Prefill batch, #new-seq"

    def parse(self, line: bytes | None, number: int) -> Iterable[TraceRequest]:
        found = _SGLANG_BATCH.search(line or b"")
        if found is None:
            return
        arrival = self._clock.read(found[1].decode())
        prompts, new, cached = (int(part) for part in found.groups()[1:])
        for one in range(min(prompts, new + cached)):
            length = (new + cached) // prompts + (one < (new + cached) % prompts)
            yield self._build(f"{number}.{one}", arrival, length, cached // prompts + (one < cached % prompts))


class LmcacheLog(_Lengths):
    """LMCache's lookups; a request that is looked up again is one request."""

    hint = "an LMCache log has lines with: Reqid: ..., Total tokens ..., LMCache hit tokens: ..."

    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens)
        self._known = _Known()

    def parse(self, line: bytes | None, _: int) -> Iterable[TraceRequest]:
        found = _LMCACHE.search(line or b"")
        if found is None or not self._known.add(found[3].decode("utf-8", "replace")):
            return
        arrival = self._clock.read(f"{found[1].decode()}.{found[2].decode()[:3]:0<3}")
        total, hit = int(found[4]), int(found[5])
        yield self._build(found[3].decode("utf-8", "replace"), arrival, total, min(total, hit))


class _Known:
    """The latest names; `add` says whether a name is new."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, None] = OrderedDict()

    def add(self, name: str) -> bool:
        if name in self._names:
            return False
        self._names[name] = None
        if len(self._names) > MAX_KNOWN:
            self._names.popitem(last=False)
        return True


def _build(name: str, arrival_s: float, tokens: list[int], block_tokens: int) -> TraceRequest:
    if not all(0 <= one < 2**63 for one in tokens):
        raise BadFieldError("tokens", "a token id is negative or too large")
    ids, lengths = cut_into_blocks(tokens, block_tokens)
    return TraceRequest(name, arrival_s, ids, lengths, ("other",) * len(ids))


def build_unshared(
    name: str, arrival_s: float, length: int, block_tokens: int, fresh: Iterator[int], output_tokens: int = 0
) -> TraceRequest:
    """Build a request of which only the length is known: its blocks have ids that nobody shares."""
    tokens = split_length(length, block_tokens)
    ids = tuple(itertools.islice(fresh, len(tokens)))
    return TraceRequest(name, arrival_s, ids, tokens, ("other",) * len(ids), output_tokens)


LOG_PARSERS: Final[Mapping[str, Callable[[int], Parser]]] = MappingProxyType(
    {"vllm_log": VllmLog, "sglang_log": SglangLog, "sglang_cache_log": SglangCacheLog, "lmcache_log": LmcacheLog}
)
LOG_FORMATS: Final = tuple(LOG_PARSERS)
LOGS_WITHOUT_CONTENT: Final = frozenset({"sglang_cache_log", "lmcache_log"})


def guess_log(line: bytes) -> str | None:
    """Guess whose log a line is from that is about no request; None if it looks like no log that we know.

    >>> guess_log(b"(APIServer pid=7) INFO 08-01 21:24:09 [loggers.py:273] Engine 000: Running: 1 reqs")
    'vllm_log'
    """
    return "vllm_log" if _VLLM_LINE.search(line) is not None else None


def recognise_log_line(line: bytes) -> str | None:
    """Recognise the log that a line is from; None if it tells nothing.

    >>> recognise_log_line(b"[2026-08-02 00:02:17] Prefill batch, #new-seq: 1, #new-token: 47, #cached-token: 1, x")
    'sglang_cache_log'
    """
    if _SGLANG_EVENT in line:
        return "sglang_log"
    if _VLLM_REQUEST.search(line) is not None and _VLLM_TIME.search(line) is not None:
        return "vllm_log"
    if _SGLANG_BATCH.search(line) is not None:
        return "sglang_cache_log"
    return "lmcache_log" if _LMCACHE.search(line) is not None else None
