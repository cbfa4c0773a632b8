"""The README's order of commands, from building a manifest to passing and failing gates."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn

pytest.importorskip("fastapi", reason="the server needs fastapi")

from sembench.cli import main
from sembench.manifests.cases import choose_cases, read_manifest, take_turns, write_manifest
from sembench.result import read_result
from semblend.config import SemBlendConfig
from semblend.engine.server.config import ServeConfig
from semblend.engine.server.routes import create_app
from semblend.engine.server.tenants import Tenants
from semblend.facade import SemBlend
from tests.fakes.fake_engine import FakeEngine, Pace

README_GATES = (
    "--min-quality-pass-rate", "0.30", "--min-backend-confirmed-block-rate", "0.05",
    "--min-materialization-events", "1",
    "--min-materialized-tokens", "512", "--max-negative-control-confirmed-rate", "0.0", "--require-materialized-reuse",
    "--require-no-engine-errors",
)  # fmt: skip
PACE = Pace(prefill_tokens_per_s=20_000, load_tokens_per_s=2_000_000)


def sembench(*words: object) -> int:
    return main([str(word) for word in words])


@contextmanager
def listening(engine, settings: ServeConfig | None = None) -> Iterator[str]:
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(engine, settings), log_level="critical", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(300)
        sock.close()


@dataclass
class House:
    """A folder, a manifest of twenty cases and an engine that writes its audit stream there."""

    folder: Path

    @property
    def manifest(self) -> Path:
        return self.folder / "manifests" / "fixture.jsonl"

    @property
    def result(self) -> Path:
        return self.folder / "results" / "live.json"

    @property
    def audit(self) -> Path:
        return self.folder / "audit.jsonl"

    @contextmanager
    def serving(self, settings: ServeConfig | None = None, **config) -> Iterator[str]:
        library = SemBlend(SemBlendConfig(embedder="none", events=str(self.audit), **config))
        with listening(FakeEngine(library, pace=PACE), settings) as url:
            yield url
        library.close()

    def gates(self, *flags: str) -> int:
        summary = self.folder / "results" / "events.json"
        words = ("--engine", "semblend", "--input", self.audit, "--output", summary)
        assert sembench("summarize-engine-events", *words) == 0
        return sembench("assert-result-gates", "--result", self.result, "--engine-summary", summary, *flags)


@pytest.fixture
def house(tmp_path) -> House:
    made = House(tmp_path)
    assert sembench("build", "--profile", "fixture", "--output", made.manifest) == 0
    return made


def live(house: House, command: str, url: str, *flags: object) -> int:
    where = ["--base-url", url, "--recipient-max-new-tokens", 24]
    if command == "run-live-gateway":
        where = ["--gateway-url", url, "--donor-url", url, "--recipient-max-tokens", 24]
    words = ["--manifest", house.manifest, "--output", house.result, *where, "--model", "fake", "--max-items", 20]
    return sembench(command, *words, "--quiet", *flags)


@pytest.mark.parametrize("command", ["run-live-sglang", "run-live-gateway"])
def test_the_commands_of_the_readme_end_in_passing_gates(house, command, capsys):
    with house.serving() as url:
        assert live(house, command, url) == 0
    result = read_result(house.result)
    assert len(result.requests) == 20
    assert result.aggregate["contradiction_count"] == 0
    assert result.aggregate["negative_control_count"] >= 1
    assert set(result.aggregate["confirmation_sources"]) == {"receipt", "usage", "prometheus"}
    assert house.gates(*README_GATES) == 0, capsys.readouterr().err
    assert result.run["manifest_sha256"]
    assert house.gates("--min-blended-ttft-speedup", "1.0") == 1  # a single arm has no pair
    assert "blended_ttft_speedup_median was not observed" in capsys.readouterr().err


def test_gates_fail_with_a_reason_when_reuse_is_switched_off(house, capsys):
    with house.serving() as url:
        assert live(house, "run-live-gateway", url, "--no-reuse", "--max-items", 6) == 0
    assert house.gates(*README_GATES) == 1
    assert "backend_confirmed_block_rate" in capsys.readouterr().err


def test_a_paired_run_with_tenants_and_audit_agrees_in_all_four_witnesses(house):
    settings = ServeConfig(tenants=Tenants({"ka": "tenant-a", "kb": "tenant-b"}, admin_keys=["root"]))
    keys = ("--api-key", "tenant-a=ka", "--api-key", "tenant-b=kb", "--admin-key", "root")
    flags = ("--paired", "--capture-logprobs", "--tenant-pairs", 2, "--connector-audit", house.audit, *keys)
    with house.serving(settings) as url:
        assert live(house, "run-live-gateway", url, *flags, "--reset-url", url, "--max-items", 8) == 0
    result = read_result(house.result)
    warm = [record for record in result.requests if record.arm == "warm"]
    assert result.aggregate["contradiction_count"] == 0
    assert all(set(record.confirmation_sources) == {"receipt", "usage", "prometheus", "audit"} for record in warm)
    assert result.aggregate["cross_tenant_count"] == 2
    assert result.aggregate["cross_tenant_backend_confirmed_rate"] == 0.0
    assert result.paired["pairs_used"] == 8
    assert result.paired["hit_rate"] > 0.3
    assert result.paired["kl_pairs"] > 0
    assert result.paired["warm_vs_cold_f1_mean"] == result.paired["rerun_vs_cold_f1_mean"] == 1.0
    assert result.config["isolation_verified"] is True


def test_a_server_without_tenants_is_found_out(house):
    with house.serving() as url:
        assert live(house, "run-live-gateway", url, "--tenant-pairs", 1, "--max-items", 2) == 0
    assert read_result(house.result).aggregate["cross_tenant_backend_confirmed_rate"] == 1.0


def test_few_cases_hold_every_transform_and_negatives_too(house):
    few = list(choose_cases(str(house.manifest), 20))
    every = {case.transform for case in read_manifest(house.manifest)}
    assert len(few) == 20
    assert {case.transform for case in few} == every
    assert len({case.source_id for case in few}) > 4  # one document would give no interval
    assert take_turns(["a"] * 3, 5) == [0, 1, 2]
    assert take_turns([], 3) == []


def test_the_embedded_engine_with_a_random_model_confirms_its_reuse(tmp_path):
    pytest.importorskip("torch", reason="the engine needs torch")
    from semblend.engine.core.assemble import assemble
    from semblend.engine.core.config import EngineConfig
    from semblend.engine.core.stops import NoText
    from semblend.engine.model.model import DecoderModel
    from semblend.engine.model.spec import ModelSpec
    from semblend.engine.server.local_engine import LocalEngine

    class Bytes(NoText):
        """A tokenizer whose tokens are bytes below 128."""

        longest_token_chars = 1

        def add(self, token):
            return chr(token)

        def token_text(self, token):
            return chr(token)

        def encode(self, text, **_):
            return [min(byte, 127) for byte in text.encode()]

        def encode_chat(self, messages, **_):
            return self.encode("\n".join(message["content"] for message in messages))

    shape = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 4096,
    }  # fmt: skip
    folder = House(tmp_path)
    assert sembench("build", "--profile", "fixture", "--output", tmp_path / "all.jsonl") == 0
    wanted = ("instruction_variant", "swapped_numbers", "negative_control")
    cases = [case for case in read_manifest(tmp_path / "all.jsonl") if case.transform in wanted]
    write_manifest(folder.manifest, [case for case in cases if len(case.recipient_prompt) < 3500][:24])
    library = SemBlend(SemBlendConfig(embedder="none", quality="fast"))
    model = DecoderModel.random(ModelSpec.from_hf_config(shape))
    inner = assemble(
        model, pool_tokens=8192, semblend=library, config=EngineConfig(model_name="fake", quality="fast"),
        detokenizer=Bytes(), donor_host_bytes=1 << 28,
    )  # fmt: skip
    engine = LocalEngine(inner, Bytes())
    engine.start()
    try:
        with listening(engine) as url:
            assert live(folder, "run-live-sglang", url, "--max-items", 3, "--paired", "--capture-logprobs") == 0
    finally:
        engine.close()
    result = read_result(folder.result)
    assert result.aggregate["contradiction_count"] == 0
    assert result.aggregate["error_count"] == 0
    assert result.paired["pairs_used"] == 3
    assert result.paired["hit_rate"] > 0.5
    assert result.aggregate["negative_control_backend_confirmed_rate"] == 0.0
    assert result.paired["rerun_vs_cold_f1_mean"] == 1.0
    assert json.loads(folder.result.read_text())["config"]["isolation"] == "flush"
