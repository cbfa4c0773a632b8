"""The README's order of commands on the embedded engine with a real model, ending in gates that pass and that fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("uvicorn", reason="a real socket needs uvicorn")

from test_end_to_end import listening, sembench

from sembench.manifests.cases import Case, read_manifest, write_manifest
from sembench.result import read_result
from semblend.config import SemBlendConfig
from semblend.engine.server.config import ServeConfig
from semblend.engine.server.launch import Launch
from semblend.models import find_model, is_pulled

MODEL = "smollm2-135m"
GATES = (
    "--min-quality-pass-rate", "0.80", "--min-backend-confirmed-block-rate", "0.05", "--min-materialization-events",
    "1", "--min-materialized-tokens", "400", "--max-negative-control-confirmed-rate", "0.0",
    "--require-materialized-reuse", "--require-no-engine-errors",
)  # fmt: skip
# The guide's figures, but for the tokens: eight prompts of 245 tokens, about half of them new or computed as a check.

pytestmark = [
    pytest.mark.slow,  # a real model answers: 70 s
    pytest.mark.skipif(not is_pulled(find_model(MODEL)), reason=f"semblend models pull {MODEL} was not run"),
]


@dataclass
class House:
    folder: Path
    url: str

    def path(self, name: str) -> Path:
        return self.folder / name

    def asked(self, cases: list[Case], name: str, *flags: object) -> Path:
        """The result of these cases, through the gateway command."""
        write_manifest(self.path(f"manifests/{name}.jsonl"), cases)
        words = ("--manifest", self.path(f"manifests/{name}.jsonl"), "--output", self.path(f"results/{name}.json"))
        where = ("--gateway-url", self.url, "--donor-url", self.url, "--model", MODEL, "--recipient-max-tokens", 12)
        assert sembench("run-live-gateway", *words, *where, "--quiet", "--warmup-requests", 0, *flags) == 0
        return self.path(f"results/{name}.json")

    def gates(self, result: Path, *flags: object) -> int:
        summary = self.path("results/engine-events.json")
        events = ("--engine", "semblend", "--input", self.path("events.jsonl"), "--output", summary)
        assert sembench("summarize-engine-events", *events) == 0
        return sembench("assert-result-gates", "--result", result, "--engine-summary", summary, *flags)


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("readme")
    # The short prompts of a fixture need not pay on this machine: they are to be reused all the same.
    measured = {"learn_costs": False, "control_share": 0.0}
    config = SemBlendConfig(embedder="none", quality="fast", events=str(folder / "events.jsonl"), **measured)
    engine = Launch(ServeConfig(model=MODEL, device="cpu", pool_tokens=8192)).engine(config)
    engine.start()
    try:
        with listening(engine) as url:
            yield House(folder, url)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, list[Case]]:
    """Forms whose one field is asked for, and unrelated texts: a model of this size can look both up."""
    path = tmp_path_factory.mktemp("built") / "fixture.jsonl"
    words = ("--profile", "fixture", "--transforms", "template_trap", "negative_control")
    assert sembench("build", *words, "--output", path) == 0
    found = list(read_manifest(path))
    forms = [case for case in found if case.transform == "template_trap"]
    unrelated = [case for case in found if case.source_id == "fixture/written-1"]
    return {"forms": forms, "unrelated": unrelated}


def reasons(capsys: pytest.CaptureFixture[str]) -> list[str]:
    said = capsys.readouterr().err.splitlines()
    return [line.removeprefix("gate failed: ") for line in said if line.startswith("gate failed: ")]


def test_the_readmes_commands_end_in_passing_gates_and_each_harm_in_a_failing_one(house, cases, capsys):
    good = house.asked(cases["forms"] + cases["unrelated"], "good")
    assert house.gates(good, *GATES) == 0, capsys.readouterr().err
    result = read_result(good)
    assert result.aggregate["contradiction_count"] == 0
    assert set(result.aggregate["confirmation_sources"]) == {"receipt", "usage", "prometheus"}
    assert house.gates(good, "--min-blended-ttft-speedup", "1.0") == 1  # a single arm has no pair
    assert reasons(capsys) == [
        "--min-blended-ttft-speedup: blended_ttft_speedup_median was not observed; it needs a live run with --paired"
    ]

    cold = house.asked(cases["forms"][:2], "cold", "--no-reuse", "--isolation", "none")
    assert house.gates(cold, "--min-backend-confirmed-block-rate", "0.05") == 1
    (found,) = reasons(capsys)  # the log names requests that opted out too, so it is a witness of this run
    assert found.startswith("--min-backend-confirmed-block-rate: backend_confirmed_block_rate is 0 ")

    wrong = [replace(case, negative_control=True, answers=("another thing",)) for case in cases["forms"][2:4]]
    harm = house.asked(wrong, "harm", "--isolation", "none")
    assert house.gates(harm, "--max-negative-control-confirmed-rate", "0.0", "--min-quality-pass-rate", "0.80") == 1
    found = reasons(capsys)
    for said in (
        "reuse_on_negatives: ",
        "--max-negative-control-confirmed-rate: negative_control_backend_confirmed_rate is 0.",  # some, and more than 0
        "--min-quality-pass-rate: quality_pass_rate is 0 ",
    ):
        assert any(reason.startswith(said) for reason in found), found


def test_the_sglang_command_runs_on_the_same_server(house, cases):
    write_manifest(house.path("manifests/few.jsonl"), cases["forms"][:1])
    words = ("--manifest", house.path("manifests/few.jsonl"), "--output", house.path("results/sglang.json"))
    assert (
        sembench(
            "run-live-sglang", *words, "--base-url", house.url, "--model", MODEL, "--quiet", "--warmup-requests", 0
        )
        == 0
    )
    result = read_result(house.path("results/sglang.json"))
    assert result.aggregate["backend_confirmed_tokens"] > 32
    assert result.aggregate["contradiction_count"] == 0
    assert json.loads(house.path("results/sglang.json").read_text())["config"]["isolation"] == "flush"
