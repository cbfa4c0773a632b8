"""Readers of trace files: our JSONL, Mooncake, Bailian (Alibaba), Azure CSV, logs and events of engines; plain or gzip.

================  ====================================================================  ========================
format            a line holds                                                          block
================  ====================================================================  ========================
semantickv        ``timestamp_ms``, ``blocks[{content_hash, semantic_type, ...}]``      as given, by content
mooncake          ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` 512 tokens, chained
bailian           ``timestamp`` (s), ``chat_id``, ``input_length``, ``type``, ...       16 tokens, chained
azure             ``TIMESTAMP,ContextTokens,GeneratedTokens``                           512 tokens, never shared
kv_events         a batch of KV events (`semantickv.traces.kv_events`)                  the engine's, by content
vllm_log          ``--enable-log-requests``, ``VLLM_LOGGING_LEVEL=DEBUG``               16 tokens, by content
sglang_log        ``--log-requests --log-requests-level 3 --log-requests-format json``  16 tokens, by content
sglang_cache_log  always on: ``Prefill batch, #new-seq: ...``                           16 tokens, never shared
lmcache_log       always on: ``Reqid: ..., Total tokens ...``                           16 tokens, never shared
================  ====================================================================  ========================

Lines, fields and the engines' requests are read by `semblend.text`, as for logs of prompts; here they become requests
with a time. A line that can't be used stops the reading with file, line and field, or is skipped and counted
(``skip_bad``).
"""

from __future__ import annotations

import csv
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from semantickv.traces.engine_logs import (
    LOG_FORMATS,
    LOG_PARSERS,
    LOGS_WITHOUT_CONTENT,
    Parser,
    TraceRequest,
    build_unshared,
    guess_log,
    recognise_log_line,
)
from semantickv.traces.kv_events import EventParser
from semblend.errors import InputError
from semblend.text.block_traces import (
    BAILIAN_BLOCK_TOKENS,
    MOONCAKE_BLOCK_TOKENS,
    read_chained_blocks,
    read_own_blocks,
    read_real,
    read_text,
    read_whole,
)
from semblend.text.log_formats import BadFieldError
from semblend.text.log_lines import MAX_LINE_BYTES, open_log, read_lines

FORMATS: Final = ("semantickv", "mooncake", "bailian", "azure", "kv_events", *LOG_FORMATS)
FORMATS_WITHOUT_CONTENT: Final = frozenset({"azure"}) | LOGS_WITHOUT_CONTENT
MAX_LINES_TO_DETECT: Final = 20_000  # an engine's log begins with its start, which is long
_DEFAULT_BLOCK: Final = {"mooncake": MOONCAKE_BLOCK_TOKENS, "azure": MOONCAKE_BLOCK_TOKENS}
_NO_TRACE: Final = f"a trace is {', '.join(FORMATS)}; a log of prompts is read by semblend estimate"


class TraceFile:
    """A trace file, opened by `read_requests`. Afterwards ``skipped`` counts the lines that could not be used.

    ``block_tokens`` replaces the block length of formats that do not store one. A line that cannot be used is an
    error, or is skipped with ``skip_bad``; so is a line earlier than the one before it, unless ``any_order``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        format: str = "auto",
        *,
        block_tokens: int | None = None,
        skip_bad: bool = False,
        any_order: bool = False,
    ) -> None:
        if format not in ("auto", *FORMATS):
            raise InputError(f"unknown trace format {format!r}", hint="auto, " + ", ".join(FORMATS))
        if block_tokens is not None and block_tokens <= 0:
            raise InputError(f"block_tokens is {block_tokens}", hint="a block has at least one token")
        self.path = Path(path)
        self.format = _detect_format(self.path) if format == "auto" else format
        self.block_tokens = block_tokens or _DEFAULT_BLOCK.get(self.format, BAILIAN_BLOCK_TOKENS)
        self.skip_bad, self.any_order, self.skipped = skip_bad, any_order, 0
        self.engine_hit_rate: float | None = None  # what the engine itself says of the whole file, once it is read

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def chained(self) -> bool:
        """Whether an id stands for a block and everything before it."""
        return self.format in ("mooncake", "bailian")

    def read_requests(self) -> Iterator[TraceRequest]:
        """Yield the requests in the order of the file; raise InputError for a bad line or a file without requests."""
        parser, found, latest_s = self._make_parser(), False, 0.0
        with open_log(self.path) as stream:
            for number, line in itertools.chain(read_lines(stream, MAX_LINE_BYTES), [(-1, None)]):
                try:
                    for request in parser.finish() if number < 0 else parser.parse(line, number):
                        if not self.any_order and request.arrival_s < latest_s:
                            problem = f"{request.arrival_s:g} s is earlier than the line before"
                            raise BadFieldError(parser.time_field, problem)
                        found, latest_s = True, request.arrival_s
                        yield request
                except BadFieldError as bad:
                    if not self.skip_bad:
                        raise _build_error(self.path, number, bad) from None
                    self.skipped += 1
        self.engine_hit_rate = parser.engine_hit_rate
        self.skipped += parser.left_out
        if not found:
            hint = parser.hint or f"read as {self.format}; {self.skipped} lines were skipped"
            raise InputError(f"{self.path}: no request in it", hint=hint)

    def _make_parser(self) -> Parser:
        if self.format == "kv_events":
            return EventParser()
        if self.format in LOG_PARSERS:
            return LOG_PARSERS[self.format](self.block_tokens)
        return _LineParser(self.format, self.block_tokens)


def _build_error(file: Path, number: int, bad: BadFieldError) -> InputError:
    """Build the error for a bad line, with file, line and field."""
    if bad.field == "blocks" and bad.problem == "missing":
        return InputError(f"{file}: line {number}: this is no line of a trace: it has no 'blocks'", hint=_NO_TRACE)
    hint = "sort the file, or pass --sort" if "earlier" in bad.problem else "correct the line, or pass --skip-bad"
    return InputError(f"{file}: line {number}: field {bad.field!r}: {bad.problem}", hint=hint)


def _detect_format(file: Path) -> str:
    """Detect the format from the first line that tells; if none does, assume ours, whose errors say what is wrong."""
    guess = None
    with open_log(file) as stream:
        for number, line in read_lines(stream, MAX_LINE_BYTES):
            if number > MAX_LINES_TO_DETECT:
                break
            if line is None:
                continue
            if line.lstrip(b"\xef\xbb\xbf").upper().startswith(b"TIMESTAMP,"):
                return "azure"
            found = None
            if line.lstrip()[:1] in (b"{", b"["):  # first: a trace that keeps text may quote a log
                with suppress(ValueError, RecursionError):
                    found = _recognise_record(json.loads(line))
            found = found or recognise_log_line(line)
            if found:
                return found
            guess = guess or guess_log(line)
    return guess or "semantickv"


def _recognise_record(record: object) -> str | None:
    """Recognise the format of one JSON line by its fields; None if it is no known one."""
    if isinstance(record, list) and len(record) > 1 and isinstance(record[1], list):
        return "kv_events"
    if not isinstance(record, dict):
        return None
    if "batch" in record:
        return "kv_events"
    if "blocks" in record:
        return "semantickv"
    if "hash_ids" in record:
        return "bailian" if "chat_id" in record else "mooncake"
    return None


class _LineParser(Parser):
    """Turns one line into a request, or raises an error that names the bad field."""

    def __init__(self, format: str, block_tokens: int) -> None:
        self.format, self.block_tokens = format, block_tokens
        self.time_field = {"azure": "TIMESTAMP", "semantickv": "timestamp_ms"}.get(format, "timestamp")
        self.columns: list[str] = []
        self.begin: datetime | None = None
        self.fresh = itertools.count()  # ids that nobody shares
        make: Mapping[str, Callable[[dict[str, Any], int], TraceRequest]] = {
            "semantickv": self._parse_semantickv,
            "mooncake": self._parse_chained,
            "bailian": self._parse_chained,
        }
        self.make = make.get(format)

    def parse(self, line: bytes | None, number: int) -> Iterator[TraceRequest]:
        """Parse one line; nothing for a heading."""
        if line is None:
            raise BadFieldError("line", f"longer than {MAX_LINE_BYTES >> 20} MiB")
        found = self._parse_azure(line, number) if self.make is None else self._parse_json(line, number, self.make)
        if found is not None:
            yield found

    def _parse_json(
        self, line: bytes, number: int, make: Callable[[dict[str, Any], int], TraceRequest]
    ) -> TraceRequest:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadFieldError("line", f"not JSON: {error}") from None
        if not isinstance(record, dict):
            raise BadFieldError("line", "not a JSON object")
        other = _recognise_record(record)
        if other != self.format and other is not None:
            raise BadFieldError("line", f"looks like {other}, the file is read as {self.format}")
        return make(record, number)

    def _parse_semantickv(self, record: dict[str, Any], number: int) -> TraceRequest:
        """Parse one line of our own format."""
        blocks = read_own_blocks(record)
        ttft = read_real(record, "observed_ttft_ms") if record.get("observed_ttft_ms") is not None else None
        return TraceRequest(
            read_text(record, "request_id", str(number)),
            read_real(record, "timestamp_ms") / 1000,
            *blocks,
            read_whole(record, "output_tokens", default=0),
            read_text(record, "tenant_id", "default"),
            read_text(record, "session_id", ""),
            ttft,
            _read_computed_tokens(record, sum(blocks.tokens)),
        )

    def _parse_chained(self, record: dict[str, Any], number: int) -> TraceRequest:
        """Parse one line of Mooncake (times in ms) or Bailian (in s)."""
        blocks = read_chained_blocks(record, self.block_tokens)
        return TraceRequest(
            str(record.get("chat_id", number)),
            read_real(record, "timestamp") / (1 if self.format == "bailian" else 1000),
            *blocks,
            read_whole(record, "output_length", default=0),
        )

    def _parse_azure(self, line: bytes, number: int) -> TraceRequest | None:
        """Parse one line of Azure CSV; None for the heading. Its blocks are never shared."""
        cells = next(csv.reader([line.decode("utf-8-sig", "replace").strip()]))
        if not self.columns:
            missing = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} - set(cells)
            if missing:
                raise BadFieldError(sorted(missing)[0], "missing in the heading")
            self.columns = cells
            return None
        if len(cells) != len(self.columns):
            raise BadFieldError("line", f"{len(cells)} cells under {len(self.columns)} headings")
        record: dict[str, Any] = dict(zip(self.columns, cells, strict=True))
        for field in ("ContextTokens", "GeneratedTokens"):
            try:
                record[field] = int(record[field])
            except ValueError:
                raise BadFieldError(field, f"{record[field]!r} is not a whole number") from None
        try:  # the fraction has seven digits, one more than datetime takes
            when = datetime.fromisoformat(record["TIMESTAMP"].strip()[:26])
        except ValueError:
            raise BadFieldError("TIMESTAMP", f"{record['TIMESTAMP']!r} is not a time") from None
        self.begin = self.begin or when
        seconds = (when - self.begin).total_seconds()
        if seconds < 0:
            raise BadFieldError("TIMESTAMP", "earlier than the first line")
        length, output = read_whole(record, "ContextTokens"), read_whole(record, "GeneratedTokens")
        return build_unshared(str(number), seconds, length, self.block_tokens, self.fresh, output)


def _read_computed_tokens(record: Mapping[str, Any], prompt_tokens: int) -> float | None:
    """Read how many prompt tokens the engine computed; None where the line does not say."""
    computed, hits = record.get("observed_prefill_tokens"), record.get("observed_prefix_hit_tokens")
    if isinstance(computed, int | float) and computed >= 0:
        return float(computed)
    return max(0.0, prompt_tokens - float(hits)) if isinstance(hits, int | float) else None
