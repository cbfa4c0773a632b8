"""What a newcomer gets wrong, command by command: one line ``error:``, one line ``hint:``, exit code 2, no traceback.

The folder of a case holds ``folder/``, ``empty.jsonl`` (no line), ``broken.jsonl`` (not JSON), ``words.txt`` (text),
``binary.jsonl`` (bytes that are no text) and ``number.json`` (JSON of another kind); ``missing.jsonl`` is not there.
``PORT`` stands for a port that somebody else listens on.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import semantickv.cli
import sembench.cli
from semblend.cli import main as semblend_main

MAINS = {"semblend": semblend_main.main, "semantickv": semantickv.cli.main, "sembench": sembench.cli.main}

MISTAKES = """
semblend
semblend nonsense
semblend --nonsense
semblend estimate
semblend estimate missing.jsonl
semblend estimate folder
semblend estimate empty.jsonl
semblend estimate broken.jsonl
semblend estimate binary.jsonl
semblend estimate number.json
semblend estimate words.txt
semblend estimate good.jsonl --limit -5
semblend estimate good.jsonl --limit many
semblend estimate good.jsonl --sample 3
semblend estimate good.jsonl --model gpt-9
semblend estimate good.jsonl --gpu abacus
semblend estimate good.jsonl --tokenizer no/such/model
semblend estimate good.jsonl --html folder
semblend estimate good.jsonl --html no/such/folder/page.html
semblend estimate good.jsonl --json no/such/folder/page.json
semblend estimate good.jsonl --prices missing.toml
semblend estimate good.jsonl --prices words.txt
semblend estimate good.jsonl --memory lots
semblend estimate good.jsonl --format odd
semblend estimate good.jsonl --block-size 0
semblend explain
semblend explain --text hello --donors missing.jsonl
semblend explain --text hello --donors folder
semblend explain --text hello --donors broken.jsonl
semblend explain --text hello --store missing.db
semblend explain --prompt-file missing.txt
semblend explain --prompt-file folder
semblend explain --tokens words.txt
semblend explain --tokens number.json
semblend explain --text hello --namespace nonsense
semblend explain --text hello --tokenizer missing.json
semblend report
semblend report missing.jsonl
semblend report folder
semblend explore --port PORT
semblend explore --port 99999
semblend explore --port -1
semblend explore --store folder
semblend explore --tokenizer words.txt
semblend serve --model no-such-model
semblend serve --model missing.gguf
semblend serve --model words.txt
semblend serve --model folder
semblend serve --port PORT --model words.txt
semblend serve --port 99999 --model words.txt
semblend serve --quality splendid --model words.txt
semblend serve --threads -3 --model words.txt
semblend serve --keys-file missing.toml --model words.txt
semblend serve --keys-file words.txt --model words.txt
semblend serve --thresholds missing.json --model words.txt
semblend serve --host 0.0.0.0 --model words.txt
semblend serve --pool-tokens -1 --model words.txt
semblend serve --donor-bits 4
semblend serve --dtype int3
semblend demo --model no-such-model
semblend demo --json no/such/folder/demo.json
semblend demo --plot no/such/folder/demo.png
semblend demo --threads -2
semblend calibrate --model no-such-model
semblend calibrate --prompts missing.jsonl
semblend calibrate --prompts broken.jsonl
semblend calibrate --prompts empty.jsonl
semblend calibrate --limit -1
semblend calibrate --target-false-safe 7
semblend calibrate --out no/such/folder/thresholds.json
semblend models pull
semblend models pull no-such-model
semblend models path no-such-model
semblend models pull smollm2-135m --from missing.gguf
semblend warm
semblend warm --corpus missing
semblend warm --corpus folder --donor-directory donors
semblend warm --corpus empty.jsonl --donor-directory donors
semblend warm --corpus broken.jsonl --donor-directory donors
semblend warm --corpus good.jsonl
semblend warm --corpus texts.jsonl --url http://127.0.0.1:9
semblend warm --corpus texts.jsonl --url nonsense
semblend warm --corpus texts.jsonl --donor-directory donors --model no-such-model
semblend warm --corpus texts.jsonl --donor-directory donors --prompt-tokens -4
semblend donors
semblend donors --store missing.db
semblend donors --store folder
semblend donors --store words.txt
semblend donors forget --store missing.db
semblend donors --store missing.db --older-than soon
semblend vllm donors
semblend vllm donors --socket missing.sock
semblend vllm donors --socket words.txt
semantickv
semantickv nonsense
semantickv replay
semantickv replay --trace missing.jsonl --cache-token-budget 1000
semantickv replay --trace folder --cache-token-budget 1000
semantickv replay --trace empty.jsonl --cache-token-budget 1000
semantickv replay --trace broken.jsonl --cache-token-budget 1000
semantickv replay --trace words.txt --cache-token-budget 1000
semantickv replay --trace number.json --cache-token-budget 1000
semantickv replay --trace binary.jsonl --cache-token-budget 1000
semantickv replay --trace good.jsonl --cache-token-budget 1000
semantickv advise --trace good.jsonl
semantickv tiers --trace good.jsonl --device-gib 1
semantickv replay --trace trace.jsonl --cache-token-budget -1
semantickv replay --trace trace.jsonl --cache-token-budget 0
semantickv replay --trace trace.jsonl --cache-gib -2
semantickv replay --trace trace.jsonl --cache-token-budget 1000 --policies clairvoyance
semantickv replay --trace trace.jsonl --cache-token-budget 1000 --max-requests 0
semantickv replay --trace trace.jsonl --cache-token-budget 1000 --output-dir words.txt
semantickv replay --trace trace.jsonl --cache-token-budget 1000 --block-tokens -1
semantickv replay --trace trace.jsonl --cache-token-budget 1000 --base-ms -5
semantickv tiers --trace missing.jsonl --device-gib 1
semantickv tiers --trace trace.jsonl --device-gib -1
semantickv tiers --trace trace.jsonl --device-gib 1 --host-gib -1
semantickv tiers --trace trace.jsonl --device-gib 1 --gpu abacus
semantickv tiers --trace trace.jsonl --device-gib 1 --decode-ms -1
semantickv advise --trace missing.jsonl
semantickv advise --trace folder
semantickv advise --trace empty.jsonl
semantickv advise --trace trace.jsonl --gpu abacus
semantickv advise --trace trace.jsonl --gib -4
semantickv advise --trace trace.jsonl --policies clairvoyance
semantickv advise --trace trace.jsonl --prices missing.toml
semantickv advise --trace trace.jsonl --hour-cost -1
semantickv collect
semantickv collect --upstream nonsense --output t.jsonl
semantickv collect --upstream http://127.0.0.1:9 --port PORT --output t.jsonl
semantickv collect --upstream http://127.0.0.1:9 --port 99999 --output t.jsonl
semantickv collect --kv-events nonsense --output t.jsonl
semantickv collect --mock --requests 0
semantickv collect --mock --output folder
semantickv collect --mock --output trace.jsonl
semantickv collect --upstream http://127.0.0.1:9 --rules missing.toml --output t.jsonl
semantickv proxy
semantickv proxy --upstream nonsense
semantickv proxy --upstream http://127.0.0.1:9 --port PORT
semantickv proxy --upstream http://127.0.0.1:9 --port 99999
semantickv proxy --upstream http://127.0.0.1:9 --port 0 --tls-cert missing.pem
semantickv proxy --upstream http://127.0.0.1:9 --port 0 --tls-key missing.pem
semantickv proxy --upstream http://127.0.0.1:9 --port 0 --drain -1
semantickv proxy --upstream http://127.0.0.1:9 --port 0 --output-dir words.txt
semantickv router
semantickv router --replicas nonsense
semantickv router --replicas http://127.0.0.1:9 --port PORT
semantickv router --replicas http://127.0.0.1:9 --policy guess --port 0
semantickv router --demo --demo-replicas 0
semantickv api --port PORT
semantickv api --policy clairvoyance --port 0
semantickv api --cache-token-budget -1 --port 0
semantickv dynamo-pin --frontend nonsense
semantickv dynamo-pin --frontend http://127.0.0.1:9 --port PORT
semantickv dynamo-router
semantickv workload nonsense --output w.jsonl
semantickv workload support_agent
semantickv workload support_agent --output no/such/folder/w.jsonl
semantickv workload support_agent --output folder
semantickv workload support_agent --output w.jsonl --sessions -1
semantickv workload support_agent --output w.jsonl --rate 0
semantickv workload rag --output w.jsonl
semantickv workload rag --output w.jsonl --data-dir missing
semantickv segment missing.txt
semantickv segment folder
semantickv segment words.txt --rules missing.toml
semantickv segment words.txt --rules words.txt
semantickv segment binary.jsonl
semantickv experiment run
semantickv experiment run --config missing.yaml
semantickv experiment run --config words.txt
semantickv experiment run --config repeated_system
semantickv experiment all --config-dir missing
semantickv check --config-dir missing
sembench
sembench nonsense
sembench build --profile fixture
sembench build --profile nonsense --output m.jsonl
sembench build --profile fixture --output folder
sembench build --profile jsonl --output m.jsonl
sembench build --profile jsonl --input missing.jsonl --output m.jsonl
sembench build --profile jsonl --input folder --output m.jsonl
sembench build --profile jsonl --input empty.jsonl --output m.jsonl
sembench build --profile jsonl --input broken.jsonl --output m.jsonl
sembench build --profile jsonl --input good.jsonl --output m.jsonl --max-prompts -1
sembench build --profile synthetic-v1 --output m.jsonl --max-items-per-dataset -1
sembench build --profile longbench-v1 --longbench-dir missing --output m.jsonl
sembench build --profile synthetic-v1 --transforms nonsense --output m.jsonl
sembench audit-manifest --manifest missing.jsonl
sembench audit-manifest --manifest folder
sembench audit-manifest --manifest empty.jsonl
sembench audit-manifest --manifest broken.jsonl
sembench audit-manifest --manifest cases.jsonl --block-size -1
sembench checksum-manifest --manifest missing.jsonl
sembench checksum-manifest --manifest broken.jsonl
sembench freeze --spec s.json --manifests-dir missing
sembench freeze --spec s.json --manifests-dir words.txt
sembench verify-frozen --spec missing.json --manifests-dir folder
sembench verify-frozen --spec words.txt --manifests-dir folder
sembench run-offline --manifest missing.jsonl --output r.json
sembench run-offline --manifest folder --output r.json
sembench run-offline --manifest empty.jsonl --output r.json
sembench run-offline --manifest broken.jsonl --output r.json
sembench run-offline --manifest cases.jsonl --output folder --quiet
sembench run-offline --manifest cases.jsonl --output r.json --planner nonsense
sembench run-offline --manifest cases.jsonl --output r.json --planner no_module:Class
sembench run-offline --manifest cases.jsonl --output r.json --block-size 0
sembench run-offline --manifest cases.jsonl --output r.json --max-items 0
sembench run-offline --manifest cases.jsonl --output r.json --distractors missing.jsonl
sembench run-offline --manifest cases.jsonl --output r.json --tokenizer no-such --no-tokenizer-stand-in
sembench verify-endpoint
sembench verify-endpoint --base-url nonsense
sembench calibrate-noise-floor --manifest missing.jsonl --output c.json --base-url http://127.0.0.1:9 --model m
sembench run-live-sglang --manifest missing.jsonl --output r.json --base-url http://127.0.0.1:9 --model m
sembench run-live-sglang --manifest cases.jsonl --output r.json --base-url http://127.0.0.1:9 --model m
sembench run-live-sglang --manifest cases.jsonl --output r.json --base-url nonsense --model m
sembench run-live-gateway --manifest cases.jsonl --output r.json --gateway-url http://127.0.0.1:9 --model m
sembench run-live-gateway --manifest cases.jsonl --output r.json --gateway-url nonsense --model m
sembench run-live-gateway --manifest cases.jsonl --output r.json --gateway-url http://127.0.0.1:9 --model m --seed x
sembench run-live-gateway --manifest cases.jsonl --output r --gateway-url http://127.0.0.1:9 --model m --api-key @none
sembench run-load --log missing.jsonl --output l.json --base-url http://127.0.0.1:9 --model m
sembench run-load --log good.jsonl --output l.json --base-url http://127.0.0.1:9 --model m
sembench run-load --log good.jsonl --output l.json --base-url nonsense --model m
sembench run-load --log good.jsonl --output l.json --base-url http://127.0.0.1:9 --model m --request-rate -1
sembench run-load --log good.jsonl --output l.json --base-url http://127.0.0.1:9 --model m --slo soon
sembench run-load --trace words.txt --output l.json --base-url http://127.0.0.1:9 --model m
sembench run-load --log empty.jsonl --output l.json --base-url http://127.0.0.1:9 --model m
sembench merge-results --cold missing.json --warm missing.json --output m.json
sembench merge-results --cold words.txt --warm number.json --output m.json
sembench engine-snapshot --metrics-url nonsense --output s.json
sembench engine-window --before missing.json --after missing.json --output w.json
sembench engine-window --before words.txt --after number.json --output w.json
sembench summarize-engine-events --engine vllm --input missing.log
sembench summarize-engine-events --engine vllm --input folder
sembench collect-k8s-engine-events --engine vllm --namespace n --pod p --output-log folder
sembench assert-result-gates --result missing.json
sembench assert-result-gates --result words.txt
sembench assert-result-gates --result number.json
sembench assert-result-gates --result folder
sembench compare missing.json missing.json
sembench compare words.txt number.json
sembench report --result missing.json
sembench report --result broken.jsonl
sembench report --result number.json
sembench report --result folder
"""
CASES = MISTAKES.strip().splitlines()
NEEDS = {"serve": "fastapi", "proxy": "uvicorn", "router": "uvicorn", "api": "uvicorn", "dynamo-pin": "uvicorn"}
OTHER_CODES = {"semantickv check --config-dir missing": 1, "semblend donors --store words.txt": 1}
"""`check` answers a question, and a missing configuration is its finding; a damaged store is not a slip of typing."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    examples = Path(__file__).parents[2] / "examples"
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "half a li\n')
    (tmp_path / "words.txt").write_text("These are words and nothing else.\n")
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(128, 256)) * 8)
    (tmp_path / "number.json").write_text("17\n")
    (tmp_path / "texts.jsonl").write_text('{"text": "A document."}\n')
    (tmp_path / "good.jsonl").write_bytes((examples / "data" / "ferry_desk.jsonl").read_bytes())
    trace = (examples / "traces" / "rag_serving_trace.jsonl").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "trace.jsonl").write_text("".join(trace[:40]), "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest of a few cases, made once."""
    path = tmp_path_factory.mktemp("cases") / "cases.jsonl"
    assert sembench.cli.main(["build", "--profile", "fixture", "--output", str(path), "--quiet"]) == 0
    return path


def check_reported(code: int, said: str, line: str) -> None:
    assert code == OTHER_CODES.get(line, 2), f"exit code {code}\n{said}"
    assert "Traceback" not in said
    assert "this should not happen" not in said
    if line in MAINS or "check" in line:  # no command at all: the help is the answer
        return
    errors = [one for one in said.splitlines() if one.startswith("error: ")]
    hints = [one for one in said.splitlines() if one.startswith("hint: ")]
    assert len(errors) == 1, said
    assert len(hints) == 1, said


@pytest.mark.parametrize("line", CASES)
def test_a_mistake_is_one_line_and_a_hint(
    line: str, folder: Path, taken_port: int, cases: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = line.replace("PORT", str(taken_port)).split()
    if words and words[0] in NEEDS:
        pytest.importorskip(NEEDS[words[0]])
    if "cases.jsonl" in words:
        (folder / "cases.jsonl").write_bytes(cases.read_bytes())
    capsys.readouterr()
    code = MAINS[program](words)
    check_reported(code, capsys.readouterr().err, line)


READ_ONLY = """
semblend estimate good.jsonl --html page.html
semblend estimate good.jsonl --json page.json
semblend demo --json demo.json
semblend demo --plot demo.png
semblend calibrate --out thresholds.json
semblend calibrate --pairs pairs.jsonl
semantickv replay --trace trace.jsonl --cache-token-budget 1000
semantickv advise --trace trace.jsonl
semantickv experiment run --config low_memory_rag_stress
semantickv workload support_agent --output w.jsonl
sembench run-offline --manifest cases.jsonl --output r.json
sembench run-load --log good.jsonl --output l.json --base-url http://127.0.0.1:9 --model m
"""


@pytest.mark.parametrize("line", READ_ONLY.strip().splitlines())
def test_a_folder_that_cannot_be_written_is_noticed_before_the_work(
    line: str, folder: Path, cases: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "cases.jsonl").write_bytes(cases.read_bytes())
    program, *words = line.split()
    if words[0] in ("demo", "calibrate"):
        pytest.importorskip("torch")
    allowed = os.access
    monkeypatch.setattr(  # permissions do not bind root, who runs the tests in a container
        os, "access", lambda path, mode: not mode & os.W_OK and allowed(path, mode)
    )
    before = sorted(folder.rglob("*"))
    code = MAINS[program](words)
    said = capsys.readouterr().err
    check_reported(code, said, line)
    assert "Permission denied" in said, "no model and no server is there, and neither was asked for"
    assert sorted(folder.rglob("*")) == before


def test_a_log_of_prompts_is_no_trace_and_the_hint_says_who_reads_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert MAINS["semantickv"](["advise", "--trace", "good.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "good.jsonl: line 1: this is no line of a trace" in said
    assert "a log of prompts is read by semblend estimate" in said


def test_a_path_with_spaces_and_letters_of_any_script_is_a_path(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = folder / "my own lögs" / "日誌 1.jsonl"
    log.parent.mkdir()
    log.write_bytes((folder / "good.jsonl").read_bytes())
    page = log.with_suffix(".html")
    assert MAINS["semblend"](["estimate", str(log), "--html", str(page)]) == 0
    assert page.stat().st_size > 1000


def test_a_package_that_is_missing_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    def fail(args: object) -> int:
        raise ModuleNotFoundError("No module named 'redis'", name="redis")

    monkeypatch.setattr("semantickv.commands.serve._run_demo", fail)
    assert semantickv.cli.main(["router", "--demo"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "error: this needs the package redis, which is not installed\nhint: pip install 'semblend-suite[edge]'\n"
    )


LONG = {
    "semblend explore --port 0": "http://",
    "semantickv router --replicas http://127.0.0.1:9 --port 0 --no-trace": "router on",
    "semantickv collect --upstream http://127.0.0.1:9 --port 0 --output t.jsonl": "listening on",
}


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
@pytest.mark.parametrize("line", LONG)
def test_ctrl_c_ends_a_server_without_a_traceback(line: str, folder: Path) -> None:
    if "router" in line:
        pytest.importorskip("uvicorn")
    program, *words = line.split()
    module = {"semblend": "semblend", "semantickv": "semantickv"}[program]
    command = [sys.executable, "-m", module, *words]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    ) as running:
        try:
            assert running.stdout is not None
            said, give_up = "", time.monotonic() + 120
            while LONG[line] not in said and time.monotonic() < give_up:
                said += running.stdout.readline()
            running.send_signal(signal.SIGINT)
            rest, _ = running.communicate(timeout=300)
        finally:
            running.kill()
    assert running.returncode in (0, 130)
    assert "Traceback" not in said + rest


@pytest.mark.parametrize("command", [["estimate", "-"], ["explain", "--text", "x", "--donors", "-"]])
def test_ctrl_c_in_the_middle_of_a_command_is_130(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        """Standard input of a person who changes their mind."""

        buffer = property(lambda self: self)

        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    assert semblend_main.main(command) == 130
    assert capsys.readouterr().err.strip().splitlines()[-1] == "interrupted"
