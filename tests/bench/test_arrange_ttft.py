"""TTFT of arranged prompts: arms take turns, a second run goes on, answers are compared with a cold run."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import arrange_ttft  # noqa: E402
from _arm_servers import KINDS, Reply  # noqa: E402
from _report import Report  # noqa: E402
from _server_process import read_cpu_ms  # noqa: E402
from _streams import PromptStream  # noqa: E402
from _vllm_runs import Rows  # noqa: E402

STREAM = PromptStream("small", ("one", "two", "three"), ((0, 1), (1, 0), (2, 1)), ("a?", "b?", "c?"))


class FakeServer:
    """Remembers what each salt asked; its answers say whether the prompt was there before, and are wrong then."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []

    def wait(self) -> None:
        """It is there."""

    def ask(self, prompt: str, tokens: int, *, name: str, salt: str, quality: str = "") -> Reply:
        del name
        before = any((prompt, salt) == earlier[:2] for earlier in self.asked)
        self.asked.append((prompt, salt, tokens))
        receipt = dict.fromkeys(KINDS, 0) | {"exact_tokens": 10 * before, "prefill_tokens": 20, "reason": None}
        return Reply("moved" if quality else "cold", 5.0, 4.0, 4.5, receipt=receipt)

    def stop(self) -> None:
        """Nothing runs."""


def make_arguments(tmp_path: Path, **more: object) -> argparse.Namespace:
    given = {"server": "embedded", "arms": ["stock", "any offset, fast", "arranged"], "pool_tokens": 1000, "seed": 1,
             "answer_tokens": 6, "cold_every": 1, "budget_s": 0.0, "rows": str(tmp_path / "rows.jsonl")}  # fmt: skip
    return argparse.Namespace(**given | more)


def run(args: argparse.Namespace) -> tuple[dict[bool, FakeServer], Rows]:
    servers, rows = {True: FakeServer(), False: FakeServer()}, Rows(args.rows)
    prompts = list(arrange_ttft.write_prompts(STREAM, args))
    arrange_ttft.send_stream(servers, prompts, rows, args)
    arrange_ttft.compute_cold(servers[True], prompts, rows, args)
    return servers, rows


def test_every_prompt_goes_through_all_arms_before_the_next_and_another_arm_begins(tmp_path: Path) -> None:
    args = make_arguments(tmp_path)
    _, rows = run(args)
    sent = [(row["number"], row["arm"]) for row in rows.rows if row["arm"] != "cold"]
    assert [number for number, _ in sent] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [arm for _, arm in sent[::3]] == args.arms


def test_an_arranged_prompt_follows_the_earlier_one_and_asks_its_own_question(tmp_path: Path) -> None:
    second = list(arrange_ttft.write_prompts(STREAM, make_arguments(tmp_path)))[1]
    assert second.texts[False].endswith("two\n\none\n\nQuestion: b?\nAnswer:")
    assert second.texts[True].endswith("one\n\ntwo\n\nQuestion: b?\nAnswer:")


def test_a_second_run_fills_the_caches_again_and_measures_only_what_is_missing(tmp_path: Path) -> None:
    args = make_arguments(tmp_path)
    _, rows = run(args)
    whole = Path(args.rows).read_text().splitlines()
    Path(args.rows).write_text("\n".join(whole[:6]) + "\n")
    servers, again = run(args)
    stock = [tokens for _, salt, tokens in servers[True].asked if salt == "stock"]
    assert stock == [1, 1, 6]
    assert sorted(map(str, again.rows)) == sorted(map(str, rows.rows))


def test_cold_runs_have_a_salt_that_no_arm_has(tmp_path: Path) -> None:
    twice = PromptStream("twice", STREAM.texts, ((0, 1), (0, 1)), ("a?", "a?"))
    args, server, rows = make_arguments(tmp_path, arms=["stock"]), FakeServer(), Rows(tmp_path / "rows.jsonl")
    prompts = list(arrange_ttft.write_prompts(twice, args))
    arrange_ttft.send_stream({True: server}, prompts, rows, args)
    assert not [salt for _, salt, _ in server.asked if salt.startswith("cold")]
    arrange_ttft.compute_cold(server, prompts, rows, args)
    assert len(server.asked) == 2, "the first stock request hit nothing: it is the cold run of both"


def test_changed_answers_are_counted_against_the_cold_run(tmp_path: Path) -> None:
    args = make_arguments(tmp_path)
    _, rows = run(args)
    report = Report("arrange_ttft")
    arrange_ttft.tabulate(report, rows, args)
    table = report.tables[1]
    at = [table["columns"].index(name) for name in ("answers", "changed", "F1 against cold")]
    found = {row[0]: [row[place] for place in at] for row in table["rows"]}
    # Every request of the stock server hit nothing: these are the cold runs, and are not compared with themselves.
    assert found == {"stock": [0, None, None], "any offset, fast": [3, 3, 0.0], "arranged": [0, None, None]}


def test_prompts_that_missed_an_arm_are_left_out_and_no_prompt_at_all_is_an_error(tmp_path: Path) -> None:
    args = make_arguments(tmp_path)
    _, rows = run(args)
    rows.rows = [row for row in rows.rows if (row.get("number"), row["arm"]) != (2, "arranged")]
    report = Report("arrange_ttft")
    arrange_ttft.tabulate(report, rows, args)
    assert "2 prompts" in report.tables[0]["title"]
    rows.rows = rows.find(arm="stock")
    with pytest.raises(SystemExit):
        arrange_ttft.tabulate(report, rows, args)


def test_the_cpu_time_of_a_process_group_is_that_of_its_processes() -> None:
    busy = "import os\nwhile os.times().user < .2: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert read_cpu_ms(child.pid) >= 200
        child.communicate(b"\n")
    assert read_cpu_ms(child.pid) == 0
