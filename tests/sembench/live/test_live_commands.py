"""The smaller live commands, against a server that listens."""

from __future__ import annotations

import asyncio
import json

import pytest
from http_answers import answering, say
from live_cases import gateway_code, manifest, run_gateway
from lying_backend import Lie, LyingBackend

from sembench.cli import build_parser, main
from sembench.live.judge import judge_answers, parse_points
from sembench.result import RequestRecord, read_result


def run(*words):
    return main([str(word) for word in words])


def test_a_cold_and_a_warm_run_become_pairs(tmp_path, capsys):
    cases = manifest(tmp_path)
    for arm in ("cold", "warm"):
        (tmp_path / arm).mkdir()
        with LyingBackend(Lie.WRONG_DONOR).serving() as server:
            run_gateway(server.url, tmp_path / arm, "--arm", arm, cases=cases)
    cold, warm = (tmp_path / arm / "result.json" for arm in ("cold", "warm"))
    merged = tmp_path / "merged.json"
    assert run("merge-results", "--cold", cold, "--warm", warm, "--output", merged, "--run-id", "m1") == 0
    result = read_result(merged)
    assert (result.run["arm"], result.run["run_id"]) == ("paired", "m1")
    assert result.paired["pairs_used"] == 5
    assert result.paired["wrong_kv_pairs"] == 3
    assert result.paired["warm_vs_cold_f1_mean"] < 1.0
    capsys.readouterr()


def test_runs_of_different_work_are_not_merged(tmp_path, capsys):
    for arm, positives in (("cold", 3), ("warm", 2)):
        (tmp_path / arm).mkdir()
        with LyingBackend().serving() as server:
            cases = manifest(tmp_path / arm, positives)
            run_gateway(server.url, tmp_path / arm, "--arm", arm, cases=cases)
    cold, warm = (tmp_path / arm / "result.json" for arm in ("cold", "warm"))
    assert run("merge-results", "--cold", cold, "--warm", warm, "--output", tmp_path / "m.json") == 2
    assert "differ in manifest_sha256" in capsys.readouterr().err
    assert not (tmp_path / "m.json").exists()


def test_cases_that_only_one_run_has_are_refused_or_left_out(tmp_path, capsys):
    cases = manifest(tmp_path)
    for arm, most in (("cold", "5"), ("warm", "2")):
        (tmp_path / arm).mkdir()
        with LyingBackend().serving() as server:
            run_gateway(server.url, tmp_path / arm, "--arm", arm, "--max-items", most, cases=cases)
    cold, warm = (tmp_path / arm / "result.json" for arm in ("cold", "warm"))
    words = ("merge-results", "--cold", cold, "--warm", warm, "--output", tmp_path / "m.json")
    assert run(*words) == 2
    assert "3 cases are not in every run" in capsys.readouterr().err
    assert run(*words, "--allow-unpaired") == 0
    assert read_result(tmp_path / "m.json").paired["pairs_total"] == 2


def test_the_noise_floor_of_a_steady_server_is_full_agreement(tmp_path, capsys):
    output = tmp_path / "noise.json"
    with LyingBackend().serving() as server:
        words = ["calibrate-noise-floor", "--manifest", manifest(tmp_path), "--output", output, "--model", "liar"]
        assert (
            run(
                *words,
                "--base-url",
                server.url,
                "--engine",
                "gateway",
                "--reset-url",
                f"{server.url}/reset_prefix_cache",
            )
            == 0
        )
    found = json.loads(output.read_text())
    assert found["calibration_version"] == "sembench.calibration.v1"
    assert (found["n_pairs"], found["pairs_contaminated"], found["pairs_errored"]) == (5, 0, 0)
    assert (found["rouge_l_mean"], found["rouge_l_p05"], found["identical_share"]) == (1.0, 1.0, 1.0)
    assert found["rouge_l_ci"] == {"lo": 1.0, "hi": 1.0, "point": 1.0}
    assert found["per_length_band"]["2k"] == {"mean": 1.0, "n": 5}
    assert found["per_length_band"]["16k"] == {"mean": None, "n": 0}
    assert json.loads(capsys.readouterr().out)["n_pairs"] == 5


def test_snapshots_are_subtracted(tmp_path, capsys):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    with LyingBackend().serving() as server:
        url = f"{server.url}/metrics"
        assert run("engine-snapshot", "--metrics-url", url, "--output", before) == 0
        server.counters.update(reused=120, requests=2)
        words = ("engine-snapshot", "--metrics-url", url, "http://127.0.0.1:9/metrics", "--output", after)
        assert run(*words, "--before", before) == 0
    delta = json.loads(after.read_text())["delta"]
    assert (delta["semblend_reused_tokens_delta"], delta["endpoints_paired"], delta["endpoints_failed"]) == (120, 1, 1)
    assert run("engine-snapshot", "--metrics-url", "http://127.0.0.1:9/metrics", "--output", after) == 1
    (tmp_path / "odd.json").write_text("{}")
    assert run("engine-snapshot", "--metrics-url", url, "--output", after, "--before", tmp_path / "odd.json") == 2
    assert "is no sembench.engine_snapshot.v1" in capsys.readouterr().err


def test_an_endpoint_is_verified_or_named_as_what_it_is(capsys):
    with LyingBackend().serving() as server:
        assert run("verify-endpoint", "--base-url", server.url, "--expect-model", "liar") == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["models"], found["gives_receipts"], found["problem"]) == (["liar"], True, None)
        assert run("verify-endpoint", "--base-url", server.url, "--expect-model", "saint") == 3
        assert "serves liar, not saint" in capsys.readouterr().err
    assert run("verify-endpoint", "--base-url", "http://127.0.0.1:9") == 3


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--paired", "--isolation", "none"], "needs an empty cache"),
        (["--paired", "--arm", "cold"], "leave one of them out"),
        (["--isolation", "flush"], "cannot be flushed"),
        (["--concurrency", "2", "--paired"], "one after the other"),
        (["--concurrency", "2", "--reset-url", "http://x:1"], "under way"),
        (["--max-items", "0"], "1 or more"),
        (["--metrics-url", "nowhere"], "is not a URL"),
        (["--require-phase0-flags"], "--engine-serve-command"),
        (["--admin-key", "@/nowhere/key"], "cannot read"),
    ],
)
def test_flags_that_do_not_go_together_are_told_before_anything_runs(tmp_path, capsys, flags, told):
    assert gateway_code("http://127.0.0.1:9", tmp_path, *flags) == 2
    assert told in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told_in_one_line(tmp_path, capsys):
    assert gateway_code("http://127.0.0.1:9", tmp_path) == 2
    assert "cannot reach" in capsys.readouterr().err


RUN = "run-id arm backend-id baseline-id engine-version skip-verify manifest output block-size max-items model"
MEASURED = "timeout-seconds quality-threshold post-donor-delay-ms paired warmup-requests cooldown-ms resume"
SGLANG = "base-url donor-max-new-tokens recipient-max-new-tokens no-flush-per-item capture-logprobs top-logprobs-num"
GATEWAY = (
    "gateway-url donor-url worker-url tenant template donor-max-tokens recipient-max-tokens concurrency reset-url "
    "min-donor-gap-requests throughput-output connector-audit engine-serve-command engine-serve-command-file "
    "engine-env metrics-url require-phase0-flags"
)
CALIBRATE = (
    "manifest output base-url model max-items max-new-tokens cooldown-ms warmup-requests timeout-seconds skip-verify"
)


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("run-live-sglang", f"{RUN} {MEASURED} {SGLANG} tokenizer"),
        ("run-live-gateway", f"{RUN} {MEASURED} {GATEWAY}"),
        ("calibrate-noise-floor", CALIBRATE),
        ("merge-results", "cold warm output run-id allow-unpaired connector-audit"),
        ("engine-snapshot", "metrics-url output timeout-seconds"),
        ("verify-endpoint", "engine base-url expect-model"),
    ],
)
def test_every_flag_that_scripts_may_use_exists(command, flags):
    parser = build_parser(command.replace("-", "_"))
    known = parser._subparsers._group_actions[0].choices[command]._option_string_actions
    assert {f"--{flag}" for flag in flags.split()} <= set(known)


def test_keys_are_used_and_never_written(tmp_path):
    key = tmp_path / "key"
    key.write_text("sk-secret\n")
    with LyingBackend().serving() as server:
        run_gateway(server.url, tmp_path, "--api-key", f"tenant-a=@{key}", "--admin-key", "sk-root")
    text = (tmp_path / "result.json").read_text()
    assert "sk-secret" not in text
    assert "sk-root" not in text


# -- the judge -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "score"),
    [("7", 0.7), ("10/10", 1.0), ("Score: 0", 0.0), ("It is 11", None), ("", None), ("3.5", None), ("I say 4.", 0.4)],
)
def test_a_judges_points_are_read_or_not_at_all(reply, score):
    assert parse_points(reply) == score


def test_a_judge_sees_the_question_the_reference_and_no_arm():
    asked = []

    async def answer(request):
        asked.append((await request.json())["messages"][0]["content"])
        return say("8")

    def record(arm, **more):
        return RequestRecord(
            item_id="i", dataset="d", transform="t", negative_control=False, pair_id="i", arm=arm, **more
        )

    records = [
        record("cold", output_text="cold words"),
        record("warm", output_text="warm words"),
        record("warm", error="no"),
    ]

    async def work(questions):
        async with answering(answer) as (client, url):
            return await judge_answers(client, url, "m", records, questions)

    gold = asyncio.run(work({"i": ("Which code?", ["K17"])}))
    assert [one.judge_score for one in gold] == [0.8, 0.8, None]
    assert "K17" in asked[0]
    assert "Which code?" in asked[0]
    against_cold = asyncio.run(work({}))
    assert [one.judge_score for one in against_cold] == [None, 0.8, None]
    assert "cold words" in asked[-1]
    assert not any(word in text for text in asked for word in ("rerun", "reuse", "donor"))


def test_a_judge_that_fails_is_asked_again_and_one_that_never_answers_gives_no_points():
    left = [2]

    async def answer(request):
        left[0] -= 1
        if left[0] >= 0:
            request.transport.close()
        return say("10")

    said = RequestRecord(
        item_id="i", dataset="d", transform="t", negative_control=False, pair_id="i", arm="cold", output_text="K17"
    )

    async def work():
        async with answering(answer) as (client, url):
            return await judge_answers(client, url, "m", [said], {"i": ("Which code?", ["K17"])})

    assert asyncio.run(work())[0].judge_score == 1.0
    left[0] = 99
    assert asyncio.run(work())[0].judge_score is None
