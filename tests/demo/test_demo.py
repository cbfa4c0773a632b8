"""The demo: its prompts share what they claim, its table is complete, and its commands fail with a hint."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semblend import Prompt, SemBlend, SemBlendConfig
from semblend.cli.main import main
from semblend.demo import workloads as made
from semblend.errors import InputError, MissingDependencyError, SemBlendError
from semblend.plan.reuse_plan import ReusePlan
from semblend.text.tokenization import StableTokenizer

VOCAB = 4096
SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
}


class Words:
    """A tokenizer without files; every token of an answer is a word."""

    def encode(self, text: str) -> list[int]:
        return [int(token) % VOCAB for token in StableTokenizer().encode(text)]

    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode("".join(f"<{message['role']}>{message['content']}\n" for message in messages))

    def stream(self) -> Words:
        return self

    def add(self, token: int) -> str:
        return f" w{token}"

    def finish(self) -> str:
        return ""


def plan_of(workload: made.Workload) -> ReusePlan:
    encode = Words().encode_chat
    with SemBlend(SemBlendConfig(embedder="none", metrics=False)) as library:
        for number, donor in enumerate(workload.donors):
            library.register(Prompt(encode(donor)), donor_id=str(number))
        plan = library.lookup(Prompt(encode(workload.prompt)))
    assert isinstance(plan, ReusePlan)
    return plan


def by_key(**options: bool) -> dict[str, made.Workload]:
    return {workload.key: workload for workload in made.workloads(**options)}


@pytest.mark.parametrize("long", [False, True])
def test_workloads_are_the_same_every_time(long):
    assert made.workloads(long=long) == made.workloads(long=long)
    assert made.dialogue(long=long) == made.dialogue(long=long)


def test_chronicles_have_the_asked_length_and_do_not_repeat_themselves():
    text = made.write_chronicle(5, 2000)
    assert 2000 <= len(text.split()) < 2060
    lines = text.splitlines()
    assert len(set(lines[2:])) == len(lines) - 2


@pytest.mark.parametrize("long", [False, True])
def test_the_same_document_is_one_span_at_another_place(long):
    plan = plan_of(by_key(long=long)["same_document"])
    assert len(plan.spans) == 1
    assert plan.spans[0].shift != 0
    assert plan.reuse_ratio > 0.9


@pytest.mark.parametrize("long", [False, True])
def test_three_edits_cut_the_document_into_four_spans_and_no_span_holds_an_edited_word(long):
    workload = by_key(long=long)["edited_document"]
    asked, donated = workload.prompt[1]["content"], workload.donors[0][1]["content"]
    for now, before in made.EDITS:
        assert asked.count(now) == donated.count(now) + 1
        assert donated.count(before) == asked.count(before) + 1
    assert workload.fact in asked
    assert workload.fact not in donated
    assert workload.stale_fact in donated
    plan = plan_of(workload)
    assert len(plan.spans) == 4
    assert plan.reuse_ratio > 0.9
    pieces = StableTokenizer().pieces("".join(f"<{m['role']}>{m['content']}\n" for m in workload.prompt))
    reused = "|".join("".join(pieces[span.target_start : span.target_end]) for span in plan.spans)
    assert workload.fact not in reused
    assert "in the presence of a witness" in reused


@pytest.mark.parametrize("long", [False, True])
def test_each_passage_comes_from_a_donor_of_its_own_in_another_order(long):
    plan = plan_of(by_key(long=long)["several_donors"])
    assert plan.donor_ids == ("1", "2", "0")
    assert all(span.donor_start > 0 and span.shift != 0 for span in plan.spans)
    assert plan.reuse_ratio > 0.85


def test_documents_are_as_long_as_promised():
    short, long = by_key(), by_key(long=True)
    for key in short:
        assert 800 < len(Words().encode_chat(short[key].prompt)) < 1500
        assert 3200 < len(Words().encode_chat(long[key].prompt)) < 6000


def test_calibration_prompts_differ_from_each_other():
    found = [workload.prompt for workload, _ in zip(made.calibration(), range(60), strict=False)]
    assert len({prompt[1]["content"] for prompt in found}) == 60


# -- on a model ------------------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch", reason="the engine needs torch")

from semblend.cli.commands import calibrate as calibrate_command  # noqa: E402
from semblend.cli.commands import demo as demo_command  # noqa: E402
from semblend.demo.runner import Arm, Demo, DemoOutcome, Watched, word_f1  # noqa: E402
from semblend.engine.model.model import DecoderModel  # noqa: E402
from semblend.engine.model.spec import ModelSpec  # noqa: E402
from semblend.engine.server.config import ServeConfig  # noqa: E402
from semblend.engine.server.launch import Launch  # noqa: E402
from semblend.materialize.gate.thresholds import (  # noqa: E402
    DEFAULT,
    Thresholds,
    borrow_dial,
)

CONFIG = SemBlendConfig(embedder="none", metrics=False, learn_costs=False)
"""A model of this size is prefilled in four milliseconds, so that reuse need not pay: it is begun all the same."""


def tiny() -> DecoderModel:
    return DecoderModel.random(ModelSpec.from_hf_config(SHAPE))


@pytest.fixture(scope="module")
def arms() -> tuple[Arm, ...]:
    engine = Launch(ServeConfig(model="tiny", pool_tokens=8192)).assemble(Watched.of(tiny()), Words(), CONFIG)
    found = Demo(engine, Words()).run(made.workloads(), made.dialogue())
    engine.check()
    return found


def test_every_workload_is_served_cold_and_in_both_modes(arms):
    expected = [(w.key, mode) for w in made.workloads() for mode in ("cold", "fast", "balanced")]
    expected += [(f"dialogue_turn_{turn}", mode) for turn in (1, 2, 3) for mode in ("cold", "balanced")]
    assert [(arm.workload, arm.name) for arm in arms] == expected


def test_cold_arms_compute_everything_and_agree_with_themselves(arms):
    for arm in arms:
        assert arm.ttft_ms > 0
        assert 0 <= arm.agreement <= 1
        assert arm.kl >= 0
        if arm.name == "cold":
            assert arm.receipt.prefill_tokens == arm.receipt.prompt_tokens
            assert len(arm.runs_ms) == 2
            assert arm.ttft_ms == min(arm.runs_ms)
            assert (arm.times_faster, arm.agreement, arm.kl) == (1.0, 1.0, 0.0)


def test_fast_arms_reuse_nearly_the_whole_prompt_and_no_arm_finds_another_in_the_cache(arms):
    for arm in arms:
        if not arm.workload.startswith("dialogue"):
            assert arm.receipt.exact_tokens == 0
        if arm.name == "fast":
            assert arm.receipt.reuse_ratio > 0.75
            assert arm.receipt.reused_tokens < arm.receipt.prompt_tokens - 32


def test_the_first_token_differs_from_cold_only_where_donor_kv_was_used(arms):
    assert any(arm.kl > 0 for arm in arms if arm.name == "fast")
    for arm in arms:
        if arm.receipt.reused_tokens == arm.receipt.exact_tokens == 0:
            assert arm.kl < 1e-4


def test_a_dialogue_takes_its_history_from_the_exact_cache_and_the_pasted_text_from_a_donor(arms):
    first, second, third = (
        arm.receipt for arm in arms if arm.workload.startswith("dialogue") and arm.name == "balanced"
    )
    assert first.exact_tokens == first.span_tokens == 0
    assert second.exact_tokens >= first.prompt_tokens - 16
    assert third.exact_tokens >= first.prompt_tokens - 16
    assert second.span_tokens + second.exact_tokens > first.prompt_tokens or second.reason is not None


def test_the_answers_of_a_demo_fit_into_json_and_a_table(arms):
    record = json.loads(json.dumps(DemoOutcome("tiny", {"device": "cpu"}, arms).to_dict()))
    assert record["schema"] == "semblend.demo.v1"
    assert sum(record["arms"][1]["tokens"].values()) == record["arms"][1]["receipt"]["prompt_tokens"]
    assert all(len(demo_command._row(arm)) == len(demo_command.HEAD) for arm in arms)


def test_a_picture_of_disturbed_times_claims_none(arms):
    pytest.importorskip("matplotlib", reason="the extra lab is not installed")
    from semblend.demo.plot import write_headline

    quiet = [replace(arm, runs_ms=(10.0, 11.0)) for arm in arms]
    assert "sooner in fast mode" in write_headline(quiet)
    assert "no measurement" in write_headline([*quiet, replace(arms[0], runs_ms=(10.0, 16.0))])


def test_the_picture_is_drawn_where_its_package_is_there(arms, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra lab is not installed")
    from semblend.demo.plot import draw

    outcome = DemoOutcome("tiny", {"device": "cpu", "threads": 1}, arms)
    draw(outcome, str(tmp_path / "demo.png"))
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="cannot write"):
        draw(outcome, str(tmp_path / "demo.nothing"))


def test_an_unwatched_model_is_refused():
    engine = Launch(ServeConfig(model="tiny", pool_tokens=512)).assemble(tiny(), Words(), CONFIG)
    with pytest.raises(SemBlendError, match="first-token logits"):
        Demo(engine, Words())


@pytest.mark.parametrize(("a", "b", "f1"), [("", "", 1), ("x", "", 0), ("a b", "b, A!", 1), ("a a b", "a c", 0.4)])
def test_word_f1_counts_words(a, b, f1):
    assert word_f1(a, b) == word_f1(b, a) == pytest.approx(f1)


# -- the commands ----------------------------------------------------------------------------------------------------


@pytest.fixture
def loads_tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Launch, "load", lambda self: (tiny(), Words()))
    monkeypatch.setattr(Launch, "path", tmp_path)


def test_the_demo_prints_its_table_even_where_it_cannot_draw(loads_tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(made, "SHORT_WORDS", 360)
    code = main(["demo", "--plot", str(tmp_path / "x.png"), "--json", str(tmp_path / "x.json")])
    out, err = capsys.readouterr()
    assert code != 0
    assert "semblend-suite[lab]" in err
    assert out.splitlines()[0].split()[:2] == ["workload", "arm"]
    assert "passages of several donors" in out
    assert len(json.loads((tmp_path / "x.json").read_text())["arms"]) == 15


@pytest.mark.parametrize("command", ["demo", "calibrate"])
def test_a_model_that_is_not_pulled_says_how_to_pull_it(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SEMBLEND_MODELS", str(tmp_path))
    assert main([command, "--model", "smollm2-135m"]) != 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "semblend models pull smollm2-135m" in err


@pytest.mark.parametrize("command", [demo_command, calibrate_command])
def test_a_missing_torch_says_what_to_install(command, monkeypatch):
    monkeypatch.delitem(sys.modules, "semblend.engine.server.launch")
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("semblend.demo.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingDependencyError, match="torch") as caught:
        command.run(Namespace())
    assert "semblend-suite[local]" in caught.value.hint


@pytest.mark.parametrize(
    "flags", [["--limit", "0"], ["--target-false-safe", "2"], ["--out", "/nowhere/at/all.json"], ["--threads", "-1"]]
)
def test_calibrate_refuses_wrong_flags_before_it_loads_a_model(flags, capsys, monkeypatch):
    monkeypatch.setattr(Launch, "load", lambda self: pytest.fail("loaded"))
    assert main(["calibrate", *flags]) != 0
    assert "hint:" in capsys.readouterr().err


def test_calibrate_writes_a_file_that_serve_reads_and_goes_on_where_it_ended(loads_tiny, tmp_path, capsys, monkeypatch):
    out, pairs = tmp_path / "thresholds.json", tmp_path / "pairs.jsonl"
    flags = ["calibrate", "--model", "tiny", "--out", str(out), "--pairs", str(pairs)]
    assert main([*flags, "--limit", "2"]) == 0
    shown, talk = capsys.readouterr()
    assert shown.splitlines()[0].startswith("computed again")
    assert "2 prompts cannot tell" in talk
    table = Thresholds.read(out)
    assert (table.provenance["model"], table.provenance["prompts"]) == ("tiny", 2)
    assert table.provenance["steps"]["10"]["pairs"] == 2
    assert Launch(ServeConfig(model="tiny", thresholds=str(out))).gate.thresholds == borrow_dial(table)
    with pairs.open("a") as stream:
        stream.write('{"key": "half')  # as a killed run leaves it
    assert main([*flags, "--limit", "3"]) == 0
    assert len(pairs.read_text().splitlines()) == 3
    from semblend.materialize import calibrate

    monkeypatch.setattr(calibrate, "measure_prompt", lambda *_, **__: pytest.fail("measured again"))
    assert main([*flags, "--limit", "3"]) == 0


def test_calibrate_measures_the_dial_and_says_how_often_cold_answers_change(loads_tiny, tmp_path, capsys):
    passages = [made.write_chronicle(seed, 60) for seed in range(4)]
    lines = []
    for number in range(40):
        order = passages[number % 4 :] + passages[: number % 4]
        lines.append({"prompt": f"Prompt {number}. " + " ".join(order) + f" Question {number}?"})
    log, out, pairs = (tmp_path / name for name in ("log.jsonl", "t.json", "p.jsonl"))
    log.write_text("\n".join(map(json.dumps, lines)))
    flags = ["calibrate", "--model", "tiny", "--prompts", str(log), "--limit", "36", "--answer-tokens", "3"]
    assert main([*flags, "--out", str(out), "--pairs", str(pairs)]) == 0
    shown = capsys.readouterr().out
    assert "at this number" in shown
    assert "two retrievals of the same passages" in shown
    assert "the same prompt again" in shown
    table = Thresholds.read(out)
    assert table.dial.repair
    assert table.provenance["noise"]["reordered"]["nats"] > table.provenance["noise"]["rerun"]["nats"]
    with pairs.open("a") as stream:
        stream.write('{"key": "k", "measure": {"order": "sideways"}}\n')
    assert main([*flags, "--pairs", str(pairs)]) != 0
    assert "is no measurement" in capsys.readouterr().err


def test_calibrate_takes_logged_prompts_and_keeps_tenants_apart(loads_tiny, tmp_path, capsys):
    text = made.write_chronicle(3, 300)
    lines = [
        {"prompt": f"First. {text}", "tenant": "a"},
        {"prompt": f"Another beginning. {text} What now?", "tenant": "b"},
        {"prompt": f"A third and longer beginning. {text} And then?", "tenant": "a"},
        {"prompt": f"First. {text} A follow-up adds a few words.", "tenant": "a"},  # an exact prefix: nothing to gate
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(map(json.dumps, lines)))
    assert main(["calibrate", "--model", "tiny", "--prompts", str(log)]) == 0
    assert "1 prompts" in capsys.readouterr().out


def test_calibrate_without_shared_text_says_what_it_needs(loads_tiny, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt": "only one"}\n')
    assert main(["calibrate", "--model", "tiny", "--prompts", str(log)]) != 0
    assert "share at least 32 tokens" in capsys.readouterr().err


def test_serve_takes_thresholds_from_a_file_or_by_the_models_name(tmp_path):
    assert Launch(ServeConfig(model="unheard-of")).gate.thresholds is DEFAULT
    assert Launch(ServeConfig(model="qwen2.5-coder-1.5b")).gate.thresholds.kl_10 == 0.05
    path = tmp_path / "t.json"
    path.write_text(Thresholds(0.1, 0.2, 0.3).to_json())
    launch = Launch(ServeConfig(model="tiny", pool_tokens=512, thresholds=str(path)))
    engine = launch.assemble(tiny(), Words(), CONFIG)
    assert engine.reuse._blender.settings.thresholds.kl_40 == 0.3
    path.write_text("{}")
    with pytest.raises(SemBlendError, match="cannot be read"):
        Launch(ServeConfig(model="tiny", thresholds=str(path))).engine(CONFIG)
