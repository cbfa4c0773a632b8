"""A donor and its KV come and go together."""

from __future__ import annotations

import numpy as np
import pytest

from semblend import Prompt, SemBlend, SemBlendConfig
from semblend.confirm.sinks import MemorySink
from semblend.engine.core.assemble import assemble
from semblend.engine.core.config import EngineConfig
from semblend.engine.core.engine import Engine
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.spec import ModelSpec
from semblend.materialize.donors import store
from semblend.wire.request import Request
from semblend.wire.sampling import Sampling

TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 500, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
    "rope_theta": 10_000.0, "tie_word_embeddings": True,
}  # fmt: skip


def engine_with(**settings: object) -> tuple[Engine, SemBlend]:
    library = SemBlend(SemBlendConfig(embedder="none", metrics=False, **settings))  # type: ignore[arg-type]
    model = DecoderModel.random(ModelSpec.from_hf_config(TINY))
    return assemble(model, pool_tokens=2048, config=EngineConfig(quality="fast"), semblend=library), library


def answer(engine: Engine, name: str, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, 500, 200)
    engine.generate([Request(name, Prompt(ids), Sampling(max_tokens=1, temperature=0.0))])


def kept(engine: Engine) -> int:
    donors = engine.reuse._blender.donor_kv
    assert donors is not None
    return len(donors)  # type: ignore[arg-type]


def test_a_donor_that_the_library_evicts_loses_its_kv():
    engine, library = engine_with(max_donors=1)
    answer(engine, "first", 1)
    answer(engine, "second", 2)
    assert [donor.donor_id for donor in library.donors()] == ["second"]
    assert kept(engine) == 1


@pytest.mark.parametrize("forget", [lambda sb: sb.clear(), lambda sb: sb.forget("first")])
def test_a_donor_that_is_forgotten_loses_its_kv(forget):
    engine, library = engine_with()
    answer(engine, "first", 1)
    assert kept(engine) == 1
    forget(library)
    assert kept(engine) == 0


def test_kv_that_does_not_fit_is_forgotten_by_the_library():
    engine, library = engine_with()
    donors = engine.reuse._blender.donor_kv
    assert donors is not None
    answer(engine, "first", 1)
    donors._books.budget["host"] = 0  # type: ignore[attr-defined]
    answer(engine, "second", 2)
    assert {donor.donor_id for donor in library.donors()} <= {"first"}


@pytest.mark.parametrize("room", [{}, {"donor_device_bytes": 1 << 30}])  # of a device that this engine does not use
def test_without_a_byte_for_donors_none_is_kept_and_nothing_fails(
    room: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    library = SemBlend(SemBlendConfig(embedder="none", metrics=False))
    model = DecoderModel.random(ModelSpec.from_hf_config(TINY))
    engine = assemble(
        model, pool_tokens=2048, config=EngineConfig(quality="fast"), semblend=library, donor_host_bytes=0, **room
    )
    answer(engine, "first", 1)
    answer(engine, "second", 2)
    assert not library.donors()
    assert kept(engine) == 0
    assert not caplog.records


def drawn(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 500, count).tolist()


def asked(engine: Engine, name: str, ids: list[int]) -> int:
    """Reused tokens of a request, by its receipt."""
    (done,) = engine.generate([Request(name, Prompt(ids), Sampling(max_tokens=1, temperature=0.0))])
    assert done.receipt is not None
    return done.receipt.reused_tokens


def test_what_stands_before_moved_kv_becomes_a_donor():
    engine, library = engine_with()
    ending, document = drawn(1, 300), drawn(2, 200)
    asked(engine, "first", [*drawn(3, 30), *ending])
    assert asked(engine, "second", [*document, *ending]) > 0
    assert {d.donor_id: d.token_count for d in library.donors()} == {"first": 330, "second": 200}
    assert asked(engine, "third", [*drawn(4, 20), *document]) > 100


def test_a_donor_on_the_disk_is_read_while_its_request_waits_and_then_reused(tmp_path):
    library = SemBlend(SemBlendConfig(embedder="none", metrics=False))
    model = DecoderModel.random(ModelSpec.from_hf_config(TINY))
    room = {"donor_host_bytes": 230 * model.new_pool(16).bytes_per_token, "donor_disk_bytes": 1 << 30}
    engine = assemble(model, pool_tokens=2048, semblend=library, donor_dir=tmp_path, **room)
    document, donors = drawn(1, 200), engine.reuse.donor_kv
    for name, ids in (("first", document), ("second", drawn(2, 200))):  # host memory has room for one
        asked(engine, name, ids)
        donors.flush()
    assert donors._books.current["first"].tier == "disk"
    assert asked(engine, "third", [*drawn(3, 20), *document]) > 100
    donors.check()
    engine.reuse.close()


def test_a_small_piece_is_not_worth_the_document_behind_it():
    engine, library = engine_with()
    instruction, document = drawn(1, 40), drawn(2, 600)
    asked(engine, "first", [*drawn(3, 50), *instruction])
    assert asked(engine, "second", [*drawn(4, 3), *instruction, *document]) == 0
    assert asked(engine, "third", [*drawn(5, 20), *document]) > 500
    assert {donor.donor_id for donor in library.donors()} >= {"first", "second"}


def test_a_full_disk_is_one_event_and_one_line_in_the_log(tmp_path, monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_donor_file", refuse)
    sink = MemorySink()
    library = SemBlend(SemBlendConfig(embedder="none", metrics=False), sinks=[sink])
    model = DecoderModel.random(ModelSpec.from_hf_config(TINY))
    room = {"donor_host_bytes": 60_000, "donor_disk_bytes": 1 << 30}  # one donor of 200 tokens
    engine = assemble(model, pool_tokens=2048, semblend=library, donor_dir=tmp_path, **room)
    for seed in range(4):
        answer(engine, f"r{seed}", seed)
        engine.reuse.donor_kv.flush()
    errors = [event.fields for event in sink.events if event.kind == "error"]
    assert [error["where"] for error in errors] == ["donor_disk"]
    assert "No space left on device" in errors[0]["message"]
    assert sum("No space left on device" in line for line in caplog.messages) == 1
    assert kept(engine) == len(library.donors()) == 1
    engine.reuse.close()
