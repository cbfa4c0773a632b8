from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from semblend.config import SemBlendConfig
from semblend.confirm import events
from semblend.confirm.events import Event, EventKind
from semblend.confirm.sinks import (
    FAILURE_LIMIT,
    CallbackSink,
    EventStream,
    FileSink,
    MemorySink,
    SinkHealth,
    open_stream,
)
from semblend.errors import ConfigError


class BrokenSink:
    """Fails while ``broken`` is set."""

    def __init__(self) -> None:
        self.broken = True
        self.seen = 0
        self.closed = 0

    def emit(self, event: Event) -> None:
        self.seen += 1
        if self.broken:
            raise OSError("no such luck")

    def close(self) -> None:
        self.closed += 1


def numbered(number: int) -> Event:
    return events.error("test", "x" * 300, f"r{number}")


def lines_of(path: Path) -> list[str]:
    return [json.loads(line)["request_id"] for line in path.read_text().splitlines() if line]


def test_memory_keeps_the_newest_events() -> None:
    sink = MemorySink(limit=2)
    for number in range(3):
        sink.emit(numbered(number))
    assert [event.request_id for event in sink.events] == ["r1", "r2"]


def test_a_callback_gets_every_event() -> None:
    seen: list[Event] = []
    sink = CallbackSink(seen.append)
    event = numbered(1)
    sink.emit(event)
    sink.close()
    assert seen == [event]


def test_a_file_is_made_with_its_folder_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "events.jsonl"
    sink = FileSink(path)
    sink.emit(numbered(1))
    sink.close()
    assert lines_of(path) == ["r1"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for number in range(2):
        sink = FileSink(path)
        sink.emit(numbered(number))
        sink.close()
    assert lines_of(path) == ["r0", "r1"]


def test_half_a_line_left_by_a_crash_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event":"err')
    sink = FileSink(path)
    sink.emit(numbered(1))
    sink.close()
    first, second = path.read_text().splitlines()
    assert first == '{"event":"err'
    assert json.loads(second)["request_id"] == "r1"


def test_a_short_write_is_an_error_and_the_next_line_stands_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    sink = FileSink(path)
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:20]))
    with pytest.raises(OSError, match="is the disk full"):
        sink.emit(numbered(1))
    monkeypatch.setattr(os, "write", real_write)
    sink.emit(numbered(2))
    sink.close()
    torn, whole = path.read_text().splitlines()
    assert len(torn) == 20
    assert json.loads(whole)["request_id"] == "r2"


def test_four_threads_and_two_sinks_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sinks = [FileSink(path), FileSink(path)]

    def work(worker: int) -> None:
        for number in range(200):
            sinks[worker % 2].emit(numbered(worker * 1000 + number))

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for sink in sinks:
        sink.close()
    expected = {f"r{worker * 1000 + number}" for worker in range(4) for number in range(200)}
    written = lines_of(path)
    assert len(written) == 800
    assert set(written) == expected


def test_two_processes_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = (
        "import sys; from semblend.confirm import events; from semblend.confirm.sinks import FileSink\n"
        "sink = FileSink(sys.argv[1])\n"
        "for n in range(300): sink.emit(events.error('test', 'x' * 400, f'{sys.argv[2]}-{n}'))\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in "ab"]
    assert [writer.wait(300) for writer in writers] == [0, 0]
    assert sorted(lines_of(path)) == sorted(f"{name}-{n}" for name in "ab" for n in range(300))


def test_a_closed_file_takes_no_event(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "events.jsonl")
    sink.close()
    sink.close()
    with pytest.raises(ValueError, match="is closed"):
        sink.emit(numbered(1))


def test_a_pipe_that_nobody_reads_costs_events_and_never_waits(
    tmp_path: Path, event_of: dict[EventKind, Event]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    sink = FileSink(tmp_path / "pipe")
    stream = EventStream([sink])
    for _ in range(100_000):
        stream.emit(event_of[EventKind.LOOKUP])
    assert stream.health[0].dropped


def test_a_file_that_cannot_be_written_is_a_setting_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "events.jsonl"):
        with pytest.raises(ConfigError, match="cannot write events") as refusal:
            FileSink(path)
        assert "SEMBLEND_EVENTS" in refusal.value.hint


def test_a_stream_feeds_every_sink() -> None:
    first, second = MemorySink(), MemorySink()
    EventStream([first, second]).emit(numbered(1))
    assert first.events == second.events
    assert len(first.events) == 1


def test_a_failing_sink_disturbs_neither_the_caller_nor_the_others(caplog: pytest.LogCaptureFixture) -> None:
    broken, memory = BrokenSink(), MemorySink()
    stream = EventStream([broken, memory])
    with caplog.at_level(logging.WARNING, logger="semblend"):
        for number in range(3):
            stream.emit(numbered(number))
    assert len(memory.events) == 3
    assert stream.health == (SinkHealth("BrokenSink", 3, False), SinkHealth("MemorySink", 0, False))
    assert [record.getMessage() for record in caplog.records] == ["event sink BrokenSink failed: no such luck"]


def test_a_sink_is_dropped_after_ten_failures_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    broken = BrokenSink()
    stream = EventStream([broken])
    for number in range(FAILURE_LIMIT + 5):
        stream.emit(numbered(number))
    assert FAILURE_LIMIT == 10
    assert (broken.seen, broken.closed) == (10, 1)
    assert stream.health == (SinkHealth("BrokenSink", 10, True),)
    assert not stream
    assert "given up after 10 failures" in caplog.text
    assert len(caplog.records) == 2


def test_a_success_starts_the_count_anew() -> None:
    broken = BrokenSink()
    stream = EventStream([broken])
    for _ in range(3):
        for number in range(9):
            stream.emit(numbered(number))
        broken.broken = False
        stream.emit(numbered(9))
        broken.broken = True
    assert stream.health == (SinkHealth("BrokenSink", 27, False),)


def test_closing_a_stream_closes_every_sink_once_even_if_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(MemorySink):
        def close(self) -> None:
            raise OSError("stuck")

    other = BrokenSink()
    stream = EventStream([Stuck(), other])
    stream.close()
    stream.close()
    stream.emit(numbered(1))
    assert (other.seen, other.closed) == (0, 1)
    assert caplog.text.count("Stuck did not close: stuck") == 1
    assert not stream


def test_settings_open_the_stream(tmp_path: Path, event_of: dict[EventKind, Event]) -> None:
    assert not open_stream(SemBlendConfig())
    memory = MemorySink()
    stream = open_stream(SemBlendConfig(events=str(tmp_path / "events.jsonl")), memory)
    for event in event_of.values():
        stream.emit(event)
    stream.close()
    written = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert written == [event.to_dict() for event in memory.events]
    assert len(written) == len(EventKind)
