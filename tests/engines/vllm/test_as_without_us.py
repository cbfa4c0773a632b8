"""Models that we decline run as without us: hybrid KV manager, prefix hits, answers, and when blocks are freed."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        ("hybrid", {"FullAttentionSpec", "SlidingWindowSpec"}),
        ("windowed", {"SlidingWindowSpec"}),
        ("recurrent", {"FullAttentionSpec", "MambaSpec"}),
    ],
)
def test_a_model_that_we_decline_answers_and_caches_as_without_a_connector(apart, tmp_path, kind, groups):
    folder = str(tmp_path / "model")
    given = {
        "kind": kind,
        "folder": folder,
        "ahead": kind == "windowed",
    }  # as on a GPU, where blocks may be kept longer
    ours, theirs = (apart("as_without_us", **given, connected=there) for there in (True, False))
    assert set(theirs["groups"]) == groups
    assert theirs["schedules ahead"] == (kind == "windowed")
    for name in ("groups", "hybrid manager is off", "blocks", "reset", "schedules ahead", "delays freeing"):
        assert ours[name] == theirs[name], name
    assert not ours["hybrid manager is off"]
    assert "hybrid kv cache manager" not in ours["log"].lower()
    for mine, other in zip(ours["answers"], theirs["answers"], strict=True):
        assert mine["tokens"] == other["tokens"]
        assert mine["cached"] == other["cached"]
        assert mine["receipt"]["reason"] == "unsupported_mode"
    assert max(answer["cached"] for answer in theirs["answers"]) > 0, "the prefix cache was at work"
    assert ours["answers"][-1]["cached"] == 0, "and was reset"
    assert ("never served" if kind == "recurrent" else "full attention") in ours["refusal"]
    assert ("--disable-hybrid-kv-cache-manager" in ours["refusal"]) == (kind == "hybrid"), "what would help is named"
    assert {answer["receipt"]["detail"] for answer in ours["answers"]} == {ours["refusal"]}
    assert (ours["donors"], ours["records"]) == (0, 0)
    assert ours["log"].count("SemBlend reuses nothing in this engine") == 1


def test_an_engine_of_a_version_that_nobody_looked_at_runs_and_its_log_says_what_to_do(apart, tmp_path):
    told = apart("unknown_version", kind="windowed", folder=str(tmp_path / "model"))
    assert all(len(answer["tokens"]) == 6 for answer in told["answers"])
    assert (told["donors"], told["records"]) == (0, 0)
    assert told["log"].count("SemBlend reuses nothing in this engine") == 1
    assert "vLLM 0.99.0 was never looked at" in told["log"]
    assert "install a newer semblend-suite" in told["log"]
    assert "Traceback" not in told["log"]
