"""Readers of trace files: our JSONL, Mooncake, Bailian (Alibaba), Azure CSV, logs and events of engines; plain or gzip.

==========  ==========================================================================  ======================
format      a line holds                                                                block
==========  ==========================================================================  ======================
semantickv  ``timestamp_ms``, ``blocks[{content_hash, semantic_type, token_count}]``    as given, by content
mooncake    ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``       512 tokens, chained
bailian     ``timestamp`` (s), ``chat_id``, ``input_length``, ``type``, ``hash_ids``    16 tokens, chained
azure       ``TIMESTAMP,ContextTokens,GeneratedTokens``                                 512 tokens, never shared
kv_events   a batch of KV events (`semantickv.traces.kv_events`)                        the engine's, by content
*_log       what an engine logged (`semantickv.traces.engine_logs`)                     16 tokens, by content
==========  ==========================================================================  ======================

A line that can't be used stops the reading with file, line and field, or is skipped and counted (``skip_bad``).
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import itertools
import json
import os
import sys
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final

from semantickv.traces.engine_logs import (
    LOG_FORMATS,
    LOG_PARSERS,
    LOGS_WITHOUT_CONTENT,
    Parser,
    guess_log,
    recognise_log_line,
)
from semantickv.traces.request import BadFieldError, TraceRequest
from semblend.errors import InputError

FORMATS: Final = ("semantickv", "mooncake", "bailian", "azure", "kv_events", *LOG_FORMATS)
FORMATS_WITHOUT_CONTENT: Final = frozenset({"azure"}) | LOGS_WITHOUT_CONTENT
MAX_LINE_BYTES: Final = 64 << 20
MOST_LINES_TO_DETECT: Final = 20_000  # an engine's log begins with its start, which is long
_DEFAULT_BLOCK: Final = {"mooncake": 512, "azure": 512}
_INT64: Final = 2**63
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
        self.block_tokens = block_tokens or _DEFAULT_BLOCK.get(self.format, 16)
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
        with closing(read_lines(self.path)) as lines:
            for number, line in itertools.chain(lines, [(-1, None)]):
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
            from semantickv.traces.kv_events import EventParser

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


@contextmanager
def _open(file: Path) -> Iterator[IO[bytes]]:
    """Open a file to read bytes; gzip is recognised by its first bytes, whatever the name."""
    try:
        plain = file.open("rb")
    except OSError as error:
        raise InputError(f"can't read {file}: {error.strerror}", hint="check the path") from None
    with plain:
        if plain.peek(2)[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=plain) as unpacked:
                yield unpacked  # type: ignore[misc]
        else:
            yield plain


def read_lines(file: Path) -> Generator[tuple[int, bytes | None], None, None]:
    """Yield the numbered lines of a file that are not blank; None for a line that is too long to hold."""
    with _open(file) as stream:
        number = 0
        try:
            while line := stream.readline(MAX_LINE_BYTES):
                number += 1
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    while (rest := stream.readline(1 << 20)) and not rest.endswith(b"\n"):
                        pass
                    yield number, None
                elif line.strip():
                    yield number, line
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{file}: line {number + 1}: the compressed data is damaged: {error}") from None


def _detect_format(file: Path) -> str:
    """Detect the format from the first line that tells; if none does, assume ours, whose errors say what is wrong."""
    guess = None
    with closing(read_lines(file)) as lines:
        for number, line in lines:
            if number > MOST_LINES_TO_DETECT:
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
        self.fresh = 0  # next id that nobody shares
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
        blocks = record.get("blocks")
        if not isinstance(blocks, list):
            raise BadFieldError("blocks", "missing" if blocks is None else "not a list")
        ids, tokens, types = [], [], []
        for place, block in enumerate(blocks):
            where = f"blocks[{place}]"
            if not isinstance(block, dict):
                raise BadFieldError(where, "not an object")
            ids.append(_read_block_id(block, where))
            tokens.append(_read_whole(block, "token_count", least=1, where=where))
            types.append(_read_text(block, "semantic_type", "other", where=where))
        ttft = _read_real(record, "observed_ttft_ms") if record.get("observed_ttft_ms") is not None else None
        return TraceRequest(
            _read_text(record, "request_id", str(number)),
            _read_real(record, "timestamp_ms") / 1000,
            tuple(ids),
            tuple(tokens),
            tuple(types),
            _read_whole(record, "output_tokens", default=0),
            _read_text(record, "tenant_id", "default"),
            _read_text(record, "session_id", ""),
            ttft,
        )

    def _parse_chained(self, record: dict[str, Any], number: int) -> TraceRequest:
        """Parse one line of Mooncake (times in ms) or Bailian (in s; its request type becomes the block type)."""
        hashes = record.get("hash_ids")
        if not isinstance(hashes, list):
            raise BadFieldError("hash_ids", "missing" if hashes is None else "not a list")
        for place, value in enumerate(hashes):
            if type(value) is not int or not -_INT64 <= value < _INT64:
                raise BadFieldError(f"hash_ids[{place}]", f"{value!r} is not an integer of 64 bits")
        length = _read_whole(record, "input_length")
        tokens = _split_tokens(length, len(hashes), self.block_tokens)
        if tokens is None:
            raise BadFieldError(
                "hash_ids", f"{len(hashes)} blocks of {self.block_tokens} tokens can't hold {length} tokens"
            )
        bailian = self.format == "bailian"
        kind = _read_text(record, "type", "other") if bailian else "other"
        return TraceRequest(
            str(record.get("chat_id", number)),
            _read_real(record, "timestamp") / (1 if bailian else 1000),
            tuple(hashes),
            tokens,
            (kind,) * len(hashes),
            _read_whole(record, "output_length", default=0),
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
        length = _read_whole(record, "ContextTokens")
        blocks = -(-length // self.block_tokens)
        self.fresh += blocks
        ids = tuple(range(self.fresh - blocks, self.fresh))
        tokens = _split_tokens(length, blocks, self.block_tokens) or ()
        output = _read_whole(record, "GeneratedTokens")
        return TraceRequest(str(number), seconds, ids, tokens, ("other",) * blocks, output)


def _split_tokens(length: int, blocks: int, block_tokens: int) -> tuple[int, ...] | None:
    """Split a length into full blocks and a last one; None if the numbers contradict each other."""
    last = length - (blocks - 1) * block_tokens
    if blocks == 0:
        return () if length == 0 else None
    return (block_tokens,) * (blocks - 1) + (last,) if 0 < last <= block_tokens else None


def _read_block_id(block: dict[str, Any], where: str) -> int:
    """Read the id of a block: a whole number as it is, a text as its hash."""
    for field in ("content_hash", "block_id"):
        value = block.get(field)
        if type(value) is int and -_INT64 <= value < _INT64:
            return value
        if isinstance(value, str) and value:
            return int.from_bytes(
                hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big", signed=True
            )
        if value is not None:
            raise BadFieldError(f"{where}.{field}", f"{value!r} is neither text nor an integer of 64 bits")
    raise BadFieldError(f"{where}.content_hash", "missing")


def _read_number(record: dict[str, Any], field: str, default: float | None, where: str) -> Any:
    """Read a finite number."""
    value = record.get(field, default)
    name = f"{where}.{field}" if where else field
    if value is None:
        raise BadFieldError(name, "missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise BadFieldError(name, f"{value!r} is not a number")
    return value


def _read_real(record: dict[str, Any], field: str) -> float:
    """Read a number that is not negative."""
    value = float(_read_number(record, field, None, ""))
    if value < 0:
        raise BadFieldError(field, f"{value:g} is negative")
    return value


def _read_whole(
    record: dict[str, Any], field: str, *, default: int | None = None, least: int = 0, where: str = ""
) -> int:
    """Read a whole number from ``least`` on."""
    value = _read_number(record, field, default, where)
    name = f"{where}.{field}" if where else field
    if value != int(value) or value >= 2**31:
        raise BadFieldError(name, f"{value!r} is not a whole number below 2**31")
    if value < least:
        raise BadFieldError(name, f"{value} is less than {least}")
    return int(value)


def _read_text(record: dict[str, Any], field: str, default: str, where: str = "") -> str:
    """Read a text, or the default if the field is missing."""
    value = record.get(field)
    if value is None:
        return default
    if not isinstance(value, str):
        raise BadFieldError(f"{where}.{field}" if where else field, f"{value!r} is not text")
    return value
