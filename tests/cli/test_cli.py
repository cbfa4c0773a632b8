"""The command line as a person meets it: data on stdout, talk on stderr, mistakes in one line with a hint."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

import semantickv
import sembench
import semblend
from semblend import Namespace, Prompt, SemBlend, SemBlendConfig
from semblend.cli.main import build_parser, main
from semblend.cli.output import write_json
from semblend.errors import SemBlendError
from semblend.name_clash import foreign_distribution, refuse_foreign_distribution
from semblend.text.tokenization import StableTokenizer

TEXT = "The pilot boat leaves the north pier two hours before high tide. " * 12
Output = pytest.CaptureFixture[str]


def run(*arguments: str, module: str = "semblend.cli.main", **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Three donors on disk: two of tenant a, one of tenant b, one of them two days old."""
    path = tmp_path / "donors.semblend"
    clock = iter([time.time() - 2 * 86_400] * 3 + [time.time()] * 1000)
    with SemBlend(SemBlendConfig(store=str(path), embedder="none"), clock=lambda: next(clock)) as sb:
        encode = StableTokenizer().encode
        sb.register(Prompt(encode(TEXT), namespace=Namespace(tenant="a")), donor_id="old")
        sb.register(Prompt(encode("new " + TEXT), namespace=Namespace(tenant="a")), donor_id="new")
        sb.register(Prompt(encode(TEXT), namespace=Namespace(tenant="b", salt="secret")), donor_id="other")
    return str(path)


# -- the frame -----------------------------------------------------------------------------------------------------


def test_without_arguments_help_goes_to_stderr_and_the_exit_code_is_2(capsys: Output) -> None:
    assert main([]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "COMMAND" in told.err


def test_every_command_has_help_and_takes_debug(capsys: Output) -> None:
    for command in ("serve", "models", "explore", "explain", "estimate", "donors", "doctor", "version"):
        assert main([command, "--help"]) == 0
        assert "--debug" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["bogus"], ["version", "--bogus"], ["explain"], ["donors"], ["explore", "--port", "x"]]
)
def test_wrong_usage_is_an_error_line_a_hint_line_and_exit_code_2(arguments: list[str], capsys: Output) -> None:
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "hint"]
    assert "--help" in lines[1]


def test_version_as_text_and_as_json(capsys: Output) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"semblend {semblend.__version__}\n"
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["semblend"] == semblend.__version__


def test_debug_shows_the_traceback_of_a_mistake_and_nothing_else_does(capsys: Output) -> None:
    assert main(["estimate", "--prompts", "/no/file"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    for arguments in (["--debug", "estimate"], ["estimate", "--debug"]):
        assert main([*arguments, "--prompts", "/no/file"]) == 2
        assert "Traceback" in capsys.readouterr().err


def test_a_fault_of_ours_is_one_line_too_and_asks_for_a_report(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    def broken(_: object) -> int:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("semblend.cli.commands.doctor.show_version", broken)
    assert main(["version"]) == 1
    assert capsys.readouterr().err.splitlines()[0] == "error: ZeroDivisionError: oh"


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("semblend.cli.commands.doctor.show_version", interrupted)
    assert main(["version"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m semblend.cli.main doctor --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "{"
    assert done.stderr == ""


# -- explain -------------------------------------------------------------------------------------------------------


def test_output_that_cannot_be_written_is_one_line_and_exit_code_1() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "semblend.cli.main", "version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: cannot write the output: No space left on device",
        "hint: is the disk full?",
    ]


def test_a_report_never_takes_the_place_of_a_device(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json(str(pipe), {"a": 1})
    assert json.loads(os.read(reader, 100)) == {"a": 1}
    os.close(reader)
    assert not pipe.is_file()


def test_explain_finds_a_shifted_text_in_a_log(tmp_path: Path, capsys: Output) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(
        json.dumps({"text": TEXT, "request_id": "r1"}) + "\n" + json.dumps({"text": TEXT, "request_id": "r1"})
    )
    assert main(["explain", "--text", "Otherwise: " + TEXT, "--donors", str(log), "--json"]) == 0
    decision = json.loads(capsys.readouterr().out)["decision"]
    assert decision["kind"] == "plan"
    assert decision["reuse_ratio"] > 0.9
    assert {span["donor_id"] for span in decision["spans"]} <= {"r1", "r1@line-2"}
    assert main(["explain", "--text", "Otherwise: " + TEXT, "--donors", str(log)]) == 0
    assert capsys.readouterr().out.startswith("reuse ")


def test_explain_sees_only_the_namespace_it_asks_for(store: str, capsys: Output) -> None:
    def kind(*flags: str) -> str:
        assert main(["explain", "--text", TEXT, "--store", store, "--json", *flags]) == 0
        return str(json.loads(capsys.readouterr().out)["decision"]["kind"])

    assert kind() == "decline"
    assert kind("--tenant", "a") == "plan"
    assert kind("--tenant", "b") == "decline"
    assert kind("--namespace", "tenant=b", "--namespace", "salt=secret") == "plan"


def test_explain_reads_token_ids_and_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    log, ids = tmp_path / "log.jsonl", list(range(100))
    log.write_text(json.dumps({"token_ids": ids}))
    for content in (ids[20:], {"prompt_token_ids": ids[20:]}):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(json.dumps(content).encode())))
        assert main(["explain", "--tokens", "-", "--donors", str(log), "--json"]) == 0
        (span,) = json.loads(capsys.readouterr().out)["decision"]["spans"]
        assert (span["donor_start"], span["target_start"], span["length"]) == (20, 0, 80)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", ""], "the prompt is empty"),
        (["--text", "x", "--store", "/no/store"], "there is no store /no/store"),
        (["--text", "x", "--namespace", "planet=x"], "--namespace 'planet=x' is not FIELD=VALUE"),
        (["--prompt-file", "-", "--donors", "-"], "standard input cannot be both"),
        (["--prompt-file", "/no/file"], "cannot read /no/file"),
        (["--tokens", "TMP/latin"], "TMP/latin is not UTF-8 text (byte 0)"),
        (["--tokens", "TMP/word"], "TMP/word is not JSON"),
        (["--tokens", "TMP/object"], "TMP/object holds no list of token ids"),
        (["--tokens", "TMP/float"], "token id at index 0 is 0.5"),
    ],
)
def test_what_explain_cannot_use_it_names(arguments: list[str], message: str, tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "latin").write_bytes(b"\xe4")
    (tmp_path / "word").write_text("word")
    (tmp_path / "object").write_text("{}")
    (tmp_path / "float").write_text("[0.5]")
    assert main(["explain", *[argument.replace("TMP", str(tmp_path)) for argument in arguments]]) == 2
    told = capsys.readouterr()
    assert message.replace("TMP", str(tmp_path)) in told.err
    assert "hint: " in told.err
    assert told.out == ""


# -- donors --------------------------------------------------------------------------------------------------------


def listed(store: str, capsys: Output, *flags: str) -> list[str]:
    assert main(["donors", "--store", store, "--json", *flags]) == 0
    return sorted(row["donor_id"] for row in json.loads(capsys.readouterr().out)["donors"])


def test_donors_are_listed_and_chosen_by_tenant_and_age(store: str, capsys: Output) -> None:
    assert listed(store, capsys) == ["new", "old", "other"]
    assert listed(store, capsys, "list", "--tenant", "a") == ["new", "old"]
    assert main(["donors", "--store", store, "list"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("donor")
    assert "3 donors" in told.err


def test_one_donor_is_shown_without_its_secrets(store: str, capsys: Output) -> None:
    assert main(["donors", "--store", store, "show", "other", "--json"]) == 0
    shown = capsys.readouterr().out
    assert json.loads(shown)["tenant"] == "b"
    assert "secret" not in shown
    assert main(["donors", "--store", store, "show", "other"]) == 0
    assert "token_count" in capsys.readouterr().out


def test_forgetting_by_id_tenant_and_age_removes_from_the_file(store: str, capsys: Output) -> None:
    assert main(["donors", "--store", store, "forget", "--tenant", "a", "--older-than", "1d"]) == 0
    assert capsys.readouterr().out == "forgot 1 donor\n"
    assert listed(store, capsys) == ["new", "other"]
    assert main(["donors", "--store", store, "forget", "--donor", "new"]) == 0
    capsys.readouterr()
    assert listed(store, capsys) == ["other"]
    assert main(["donors", "--store", store, "forget", "--older-than", "7d", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"forgotten": 0}
    with SemBlend(SemBlendConfig(store=store, embedder="none")) as sb:
        assert [donor.donor_id for donor in sb.donors()] == ["other"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show"], "donors show needs an id"),
        (["show", "nobody"], "no donor 'nobody'"),
        (["list", "old"], "donors list takes no id"),
        (["list", "--donor", "old"], "--donor belongs to donors forget"),
        (["forget"], "donors forget needs --donor"),
        (["forget", "--donor", "old", "--tenant", "a"], "donors forget needs --donor"),
        (["forget", "--donor", "nobody"], "no donor 'nobody'"),
        (["forget", "--older-than", "soon"], "'soon' is not an age"),
    ],
)
def test_a_mistake_forgets_nothing(store: str, arguments: list[str], message: str, capsys: Output) -> None:
    assert main(["donors", "--store", store, *arguments]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert "hint: " in told.err
    assert len(listed(store, capsys)) == 3


def test_a_file_that_is_no_store_is_told_apart_and_left_alone(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes, not a store\n" * 100)
    assert main(["donors", "--store", str(path)]) == 1
    assert str(path) in capsys.readouterr().err
    assert path.read_text().startswith("my notes")
    assert main(["donors", "--store", str(tmp_path / "typo")]) == 2
    assert not (tmp_path / "typo").exists()


# -- doctor --------------------------------------------------------------------------------------------------------


def test_doctor_finds_this_installation_sound(capsys: Output) -> None:
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    checks = {(check["section"], check["name"]): check for check in answer["checks"]}
    assert answer["status"] == "ok"
    assert checks["self test", "find and verify"]["status"] == "ok"
    assert checks["kernels", "compile"]["status"] == "ok"
    assert ("settings", "min_span_tokens") in checks
    assert ("embedders", "lexical") in checks
    assert ("engines", "vllm") in checks
    assert main(["doctor"]) == 0
    assert "self test" in capsys.readouterr().out


WINDOWED = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "hidden_size": 640,
    "head_dim": 256,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 32768,
}
GEMMA = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
GEMMA_4B = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
GEMMA_4B |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # no more is in its file
LATENT = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61}
LATENT |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 4096}
PLAIN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 28, "vocab_size": 1000}
PLAIN |= {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 64}
PLAIN |= {"max_position_embeddings": 32768, "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("config", "kv", "said"),
    [
        (PLAIN, "28 KiB", dict.fromkeys(("vllm", "sglang", "transformers", "embedded"), "served")),
        (WINDOWED, "2 KiB", {"vllm": "with --disable-hybrid-kv-cache-manager", "transformers": "sliding window"}),
        (LATENT, "69 KiB", {"vllm": "served", "sglang": "never looked at", "transformers": "latents"}),
        (PLAIN | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "28 KiB", {"vllm": "never served"}),
        (PLAIN | {"model_type": "mistral", "sliding_window": 4096}, "28 KiB", {"vllm": "no layer has full attention"}),
        (PLAIN | {"model_type": "gemma2", "sliding_window": 4096}, "28", {"vllm": "with --disable-hybrid"}),
        ({"text_config": PLAIN, "architectures": ["SomeVLM"], "model_type": "some"}, "28 KiB", {"vllm": "SomeVLM"}),
        ({"text_config": PLAIN, "architectures": ["Qwen2_5_VLForConditionalGeneration"]}, "28", {"vllm": "served"}),
        ({"text_config": WINDOWED, **GEMMA}, "2 KiB", {"vllm": "with --disable-hybrid", "sglang": "never looked at"}),
        ({"text_config": GEMMA_4B, **GEMMA}, "of unknown KV size", {"vllm": "with --disable-hybrid"}),
    ],
)
def test_doctor_says_of_a_models_config_which_engines_serve_it(
    config, kv, said, tmp_path: Path, capsys: Output
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["doctor", "--json", str(tmp_path)]) == 0
    found = {check["name"]: check["detail"] for check in json.loads(capsys.readouterr().out)["checks"]}
    assert kv in found["type"]
    for engine, words in said.items():
        assert words in found[engine], found
        assert found[engine].startswith("served" if "with" in words or words == "served" else "declined: ")


def test_doctor_names_the_thresholds_of_a_model_that_was_measured(tmp_path: Path, capsys: Output) -> None:
    folder = tmp_path / "Qwen2.5-Coder-1.5B-Instruct"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PLAIN))
    assert main(["doctor", str(folder / "config.json")]) == 0
    assert "measured: thresholds of qwen2.5-coder-1.5b" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"vocab_size": 5}'])
def test_doctor_says_what_to_name_where_a_file_describes_no_model(text: str, tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "config.json").write_text(text)
    assert main(["doctor", str(tmp_path)]) == 2
    assert "hint: " in capsys.readouterr().err


def test_doctor_reports_a_broken_setting_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("SEMBLEND_MAX_DONORS", "many")
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "SEMBLEND_MAX_DONORS='many' is not a whole number" in shown
    assert "hint: " in shown


def test_doctor_hides_a_password_in_an_address(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("SEMBLEND_NATS_URL", "nats://me:hush@host:4222")
    assert main(["doctor", "--json"]) == 0
    shown = capsys.readouterr().out
    assert "hush" not in shown
    assert "***@host:4222" in shown


# -- explore ---------------------------------------------------------------------------------------------------------


def test_explore_prints_its_address_answers_and_stops_cleanly_when_asked_to(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "semblend.cli.main",
        "explore",
        "--port",
        "0",
        "--store",
        str(tmp_path / "s.semblend"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            with urllib.request.urlopen(url + "health", timeout=300) as answer:
                assert json.load(answer)["store"] == str(tmp_path / "s.semblend")
        finally:
            server.terminate()
            out, err = server.communicate(timeout=300)
    assert (server.returncode, out) == (0, "")
    assert err.splitlines() == ["semblend explorer; Ctrl-C stops it", "stopped"]


# -- the foreign distribution --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["semblend-0.3.25.dist-info", "SemBlend-0.1-py3.11.egg-info", "semblend.egg-info"])
def test_a_foreign_distribution_of_our_import_name_is_refused_with_a_hint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(SemBlendError, match="another project's package named semblend") as caught:
        refuse_foreign_distribution([str(tmp_path)])
    assert "pip uninstall semblend" in caught.value.hint


@pytest.mark.parametrize(
    "name", ["semblend_suite-0.1.0.dist-info", "semblend-suite-0.1.0.dist-info", "semblendx-1.dist-info"]
)
def test_our_own_distribution_and_others_are_not_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    refuse_foreign_distribution([str(tmp_path), str(tmp_path / "gone"), str(Path(__file__))])
    assert foreign_distribution() is None


# -- the other two commands ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", [semantickv, sembench])
def test_the_other_packages_tell_their_version_and_refuse_a_command_they_do_not_have(package: SimpleNamespace) -> None:
    name = package.__name__
    assert package.__version__ == semblend.__version__
    assert run("--version", module=name).stdout == f"{name} {semblend.__version__}\n"
    assert run("--help", module=name).returncode == 0
    refused = run("run-everything", "--fast", module=name)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "'run-everything'" in refused.stderr
    assert "hint: " in refused.stderr
    assert run(module=name).returncode == 2


def test_sembench_lists_its_commands() -> None:
    helped = set(run("--help", module="sembench").stdout.split())
    assert {"build", "run-offline", "run-live-sglang", "run-live-gateway", "run-load", "report", "compare"} <= helped
    assert {"summarize-engine-events", "collect-k8s-engine-events", "assert-result-gates"} <= helped


def test_the_parser_is_public_and_names_every_command() -> None:
    assert "{" not in (build_parser().description or "")
    assert build_parser().parse_args(["version"]).command == "version"


@pytest.mark.parametrize(
    ("launcher", "says"),
    [
        ("sglang", "Start SGLang's HTTP server with semantic KV reuse"),
        ("trtllm", "never run on the real engine"),
    ],
)
def test_a_launcher_explains_itself_without_its_engine(launcher, says, capsys, monkeypatch):
    from semblend.cli.commands import launchers

    monkeypatch.setattr("sys.argv", [f"semblend-{launcher}", "--help"])
    with pytest.raises(SystemExit) as stopped:
        getattr(launchers, launcher)()
    assert stopped.value.code == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert f"semblend-{launcher}" in said.out
    assert says in " ".join(said.out.split())


@pytest.mark.parametrize("launcher", ["sglang", "trtllm"])
@pytest.mark.parametrize("words", [[], ["--model-path", "some/model", "--host", "::"]])
def test_a_launcher_without_its_engine_or_integration_says_so_and_starts_nothing(launcher, words, capsys, monkeypatch):
    from semblend.cli.commands import launchers

    monkeypatch.setattr("sys.argv", [f"semblend-{launcher}", *words])
    with pytest.raises(SystemExit) as stopped:
        getattr(launchers, launcher)()
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "hint:" in said.err
