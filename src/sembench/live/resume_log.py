"""The resume log of a run: one line for each finished item, beside the result file.

A run that is interrupted, or whose server dies, loses at most the item it was working on. The result file is written
at the end of the run, and the log is deleted then.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from sembench.files import make_folder_of, open_output
from sembench.result import RequestRecord, dump_record, parse_record
from semblend._version import __version__
from semblend.cli.output import say
from semblend.errors import InputError

FORMAT = "sembench.partial.v1"


class ResumeLog:
    """Opened at the start of a run. ``what`` describes the run; a log of another run is not continued.

    ``run_name`` stands in the id of every request, so that an engine's log can be joined to this run and to no other.
    It stays the same when a run is continued. ``sessions`` are the starts of the run, this one included.
    """

    def __init__(
        self, output: str, what: Mapping[str, Any], *, resume: bool, session: Mapping[str, Any] | None = None
    ) -> None:
        self.path = Path(f"{output}.partial.jsonl")
        self.done: dict[str, tuple[RequestRecord, ...]] = {}
        self.run_name = uuid.uuid4().hex[:8]
        self.sessions: list[Mapping[str, Any]] = []
        make_folder_of(self.path)
        if resume and self.path.exists():
            self.done = self._read(what)
        elif self.path.exists():  # keep it: it may hold hours of measuring, and --resume may have been forgotten
            self.path.replace(f"{self.path}.old")
            say(f"note: an interrupted run was found and kept as {self.path}.old; --resume would have gone on with it")
        self.sessions.append(dict(session or {}))
        # The new file replaces the old one in one step, so that earlier measurements are never missing.
        with open_output(self.path) as stream:
            stream.write(
                _format_line(
                    {
                        "partial_version": FORMAT,
                        "sembench_version": __version__,
                        "run_name": self.run_name,
                        "sessions": self.sessions,
                        "what": dict(what),
                    }
                )
            )
            stream.writelines(_format_item(item_id, records) for item_id, records in self.done.items())
        self._stream: TextIO = self.path.open("a", encoding="utf-8")

    def add(self, item_id: str, records: Sequence[RequestRecord]) -> None:
        self.done[item_id] = tuple(records)
        self._stream.write(_format_item(item_id, records))
        self._stream.flush()

    def close(self, *, finished: bool) -> None:
        self._stream.close()
        if finished:
            self.path.unlink(missing_ok=True)

    def _read(self, what: Mapping[str, Any]) -> dict[str, tuple[RequestRecord, ...]]:
        """Return the items without an error; a last line that was cut off is left out."""
        found: dict[str, tuple[RequestRecord, ...]] = {}
        lines = self.path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            value = _parse_object(line)
            if value is None or (number > 1 and not {"item_id", "records"} <= value.keys()):
                if number == len(lines) > 1:
                    break
                raise InputError(f"{self.path} line {number} is damaged", hint="start without --resume")
            if number == 1:
                self._check_header(value, what)
                self.run_name = str(value.get("run_name") or self.run_name)
                self.sessions = [dict(one) for one in value.get("sessions") or () if isinstance(one, dict)]
                continue
            records = tuple(parse_record(one, where=f"{self.path} line {number}") for one in value["records"])
            if all(record.error is None for record in records):
                found[value["item_id"]] = records
        return found

    def _check_header(self, header: Mapping[str, Any], what: Mapping[str, Any]) -> None:
        wrote = header.get("sembench_version")
        if header.get("partial_version") != FORMAT or wrote != __version__:
            raise InputError(
                f"{self.path} was begun by version {wrote}, this is {__version__}", hint="start without --resume"
            )
        earlier = header.get("what", {})
        for name, value in what.items():
            if earlier.get(name) != json.loads(json.dumps(value)):
                raise InputError(
                    f"{self.path} was begun with {name} {earlier.get(name)!r}, now it is {value!r}",
                    hint="use the same arguments, or start without --resume",
                )


def _format_item(item_id: str, records: Sequence[RequestRecord]) -> str:
    return _format_line({"item_id": item_id, "records": [dump_record(record) for record in records]})


def _format_line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=True) + "\n"


def _parse_object(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
