"""The command line of semantickv: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from semantickv.cli import COMMANDS, build_parser, main
from semantickv.settings import VARIABLES, ApiSettings, EdgeSettings, find_variable
from semantickv.simulator.policies import POLICIES
from semantickv.traces.trace import Trace
from semblend.errors import ConfigError
from tools.reference.semantickv_pages import PAGE, render
from tools.reference.semblend_pages import commands_of, options_of

ROOT = Path(__file__).parents[2]
Captured = pytest.CaptureFixture[str]


def test_help_lists_every_command_and_no_command_is_usage(capsys: Captured) -> None:
    assert main(["--help"]) == 0
    assert {name.replace("_", "-") for name in COMMANDS} <= set(capsys.readouterr().out.split())
    assert main([]) == 2
    assert main(["dance"]) == 2
    assert "hint: " in capsys.readouterr().err


def test_the_reference_page_is_what_the_parser_would_write_now() -> None:
    assert (ROOT / "docs" / "reference" / PAGE).read_text(encoding="utf-8") == render(), "run make docs"
    for name, command in commands_of(build_parser()).items():
        assert all(option.help for option in options_of(command)), f"semantickv {name}: a flag has no help"


def test_starting_is_light() -> None:
    script = "import sys, semantickv.cli as c; c.build_parser(); print(*{n.split('.')[0] for n in sys.modules})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"matplotlib", "numba", "torch", "yaml", "httpx", "fastapi"} & set(done.stdout.split())


def test_check_finds_everything_in_a_checkout(capsys: Captured) -> None:
    assert main(["check", "--config-dir", str(ROOT / "configs" / "experiments")]) == 0
    assert "FAILED" not in capsys.readouterr().out


def test_check_fails_where_configurations_are_missing(tmp_path: Path, capsys: Captured) -> None:
    assert main(["check", "--config-dir", str(tmp_path)]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_policies_are_listed(capsys: Captured) -> None:
    assert main(["policies", "--json"]) == 0
    assert [one["policy"] for one in json.loads(capsys.readouterr().out)] == list(POLICIES)


def test_a_prompt_is_cut_in_every_shape(tmp_path: Path, capsys: Captured) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "When?"}]
    shapes = (json.dumps({"messages": messages}), json.dumps(messages), "SYSTEM: Be brief.\nUSER: When?")
    for text in shapes:
        file = tmp_path / "prompt"
        file.write_text(text)
        assert main(["segment", str(file), "--json"]) == 0
        assert [block["semantic_type"] for block in json.loads(capsys.readouterr().out)] == ["system", "user"]


def test_an_empty_prompt_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("  \n"))
    assert main(["segment"]) == 2
    assert "empty" in capsys.readouterr().err


def test_the_rules_are_shown(capsys: Captured) -> None:
    assert main(["segment", "--show-rules"]) == 0
    assert "legal_evidence" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["w.jsonl", "w.jsonl.gz"])
def test_a_workload_is_written_and_read_again(tmp_path: Path, name: str, capsys: Captured) -> None:
    path = tmp_path / name
    assert main(["workload", "support_agent", "--output", str(path), "--sessions", "5", "--tenants", "2"]) == 0
    facts = json.loads(capsys.readouterr().out)
    trace = Trace.read(path)
    assert (len(trace), trace.block_accesses) == (facts["requests"], facts["block_accesses"])
    assert set(trace.tenant_names) == {"tenant-0", "tenant-1"}


def test_real_text_needs_a_folder(tmp_path: Path, capsys: Captured) -> None:
    assert main(["workload", "chats", "--output", str(tmp_path / "x.jsonl")]) == 2
    assert "--data-dir" in capsys.readouterr().err


def test_made_up_traffic_is_collected_replayed_and_never_appended(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "mock.jsonl"
    assert main(["collect", "--mock", "--requests", "12", "--output", str(path)]) == 0
    assert capsys.readouterr().out.strip() == str(path)
    assert main(["replay", "--trace", str(path), "--cache-token-budget", "9000", "--policies", "lru", "--no-plots",
                 "--json", "--output-dir", str(tmp_path)]) == 0  # fmt: skip
    assert json.loads(capsys.readouterr().out)["trace"]["requests"] == 12
    assert main(["collect", "--mock", "--output", str(path)]) == 2


def test_collect_needs_a_source(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.delenv("SEMANTICKV_UPSTREAM_BASE_URL", raising=False)
    assert main(["collect"]) == 2
    assert "--upstream" in capsys.readouterr().err


def test_the_example_trace_is_what_the_seed_gives(tmp_path: Path) -> None:
    path = tmp_path / "again.jsonl"
    assert main(["collect", "--mock", "--requests", "240", "--seed", "7", "--output", str(path)]) == 0
    assert path.read_bytes() == (ROOT / "examples" / "traces" / "rag_serving_trace.jsonl").read_bytes()


def test_experiment_all_writes_the_aggregate_beside_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["experiment", "all", "--no-plots", "--output-dir", str(tmp_path), "--policies", "lru", "fifo"]) == 0
    assert "simulated" in capsys.readouterr().out.splitlines()[0]
    names = {path.name for path in tmp_path.iterdir()}
    assert {"aggregate_summary.csv", "aggregate_summary.md"} <= names
    assert len(names) == 7


def test_experiment_run_takes_a_name_or_a_file_and_needs_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(ROOT)
    rest = ["--no-plots", "--json", "--policies", "lru", "--output-dir", str(tmp_path)]
    for config in ("legal_review_long_context", "configs/experiments/legal_review_long_context.yaml"):
        assert main(["experiment", "run", "--config", config, *rest]) == 0
        assert json.loads(capsys.readouterr().out)[0]["experiment_id"] == "legal_review_long_context"
    assert main(["experiment", "run"]) == 2
    assert "--config" in capsys.readouterr().err


STARTS = {
    "router": ["router", "--replicas", "http://127.0.0.1:8101,http://127.0.0.1:8102", "--no-trace"],
    "dynamo-pin": ["dynamo-pin", "--frontend", "http://127.0.0.1:8000"],
}


@pytest.mark.parametrize("command", STARTS)
@pytest.mark.parametrize(
    ("flags", "variable", "said", "hint"),
    [
        ([], "", "reuse equal passages anywhere", "for stock vLLM or SGLang: --engine-reuse prefix"),
        ([], "prefix", "reuse equal beginnings only", "--engine-reuse spans"),
        (["--engine-reuse", "prefix"], "", "reuse equal beginnings only", "--engine-reuse spans"),
        (["--engine-reuse", "spans"], "prefix", "reuse equal passages anywhere", "--engine-reuse prefix"),
    ],
    ids=["default", "variable", "flag", "the flag wins"],
)
def test_a_router_says_at_its_start_what_it_takes_its_engines_for(
    command: str,
    flags: list[str],
    variable: str,
    said: str,
    hint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.setenv("SEMANTICKV_ENGINE_REUSE", variable)
    monkeypatch.setattr(
        "semblend.http.server.run_server", lambda app, *_, announce, **__: announce("http://127.0.0.1:1") or 0
    )
    assert main([*STARTS[command], *flags]) == 0
    captured = capsys.readouterr()
    assert said in captured.err
    assert hint in captured.err
    assert not captured.out


def test_a_router_that_looks_at_no_passages_does_not_speak_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(
        "semblend.http.server.run_server", lambda app, *_, announce, **__: announce("http://127.0.0.1:1") or 0
    )
    assert main([*STARTS["router"], "--policy", "cache_aware"]) == 0
    assert "engines are taken" not in capsys.readouterr().err


@pytest.mark.parametrize("word", ["any-offset", "Prefix", ""])
def test_a_kind_of_reuse_that_does_not_exist_is_refused(word: str, capsys: Captured) -> None:
    assert main([*STARTS["router"], "--engine-reuse", word]) == 2
    assert "prefix" in capsys.readouterr().err


def test_settings_are_listed_checked_and_read_in_one_place() -> None:
    known = [one.name for kind in (EdgeSettings, ApiSettings) for one in fields(kind)]
    assert {find_variable(name) for name in known} == set(VARIABLES)
    for name, text in (
        ("REDACT_TEXT", "maybe"), ("SESSION_HINT", "cookie"), ("MAX_ATTEMPTS", "1.5"),
        *(("PROXY_TIMEOUT_SECONDS", text) for text in ("0", "-1", "inf", "soon")),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"SEMANTICKV_{name}={text}"):
            EdgeSettings.read({f"SEMANTICKV_{name}": text})
    read = EdgeSettings.read({"SEMANTICKV_REPLICAS": "a,,b", "SEMANTICKV_KV_EVENTS": ",tcp://b:1"})
    assert (read.replicas, read.kv_events) == (("a", "b"), ("", "tcp://b:1"))
