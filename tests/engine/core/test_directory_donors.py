"""Embedded engines share donors through a folder: a neighbour's KV is used, and never across a wall."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from semblend import Namespace, Prompt, SemBlend, SemBlendConfig
from semblend.engine.core.assemble import assemble
from semblend.engine.core.config import EngineConfig
from semblend.engine.core.directory_donors import open_directory
from semblend.engine.core.engine import Engine
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.spec import ModelSpec
from semblend.wire.request import Request
from semblend.wire.sampling import Sampling

TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 500, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
    "rope_theta": 10_000.0, "tie_word_embeddings": True,
}  # fmt: skip
DOCUMENT = np.random.default_rng(1).integers(0, 500, 200).tolist()


@pytest.fixture
def start(tmp_path):
    """Start an engine over the folder; every one is closed in the end."""
    engines: list[Engine] = []

    def make(*, seed: int = 0, bits: int = 16, budget: int = 1 << 30, name: str = "tiny") -> Engine:
        model = DecoderModel.random(ModelSpec.from_hf_config(TINY), seed)
        kv = open_directory(str(tmp_path / "shared"), model, bits=bits)
        library = SemBlend(SemBlendConfig(embedder="none", metrics=False))
        config = EngineConfig(quality="fast", model_name=name)
        engine = assemble(model, pool_tokens=2048, config=config, semblend=library, donor_bits=bits, directory=kv)
        engine.reuse.share_donors(kv, str(tmp_path / "shared"), budget, every_s=0.0)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.reuse.directory.close()


def ask(engine, name, ids, *, tenant="", quality=None):
    prompt = Prompt(ids, namespace=Namespace(tenant=tenant, model=engine.config.model_name))
    (done,) = engine.generate([Request(name, prompt, Sampling(max_tokens=4, temperature=0.0), quality=quality)])
    engine.reuse.directory.publisher.flush()
    return done


def draw(seed, count):
    return np.random.default_rng(seed).integers(0, 500, count).tolist()


@pytest.mark.parametrize("bits", [16, 8])
def test_a_neighbour_uses_what_another_engine_computed_as_its_own(start, bits):
    writer, reader = start(bits=bits), start(bits=bits)
    ask(writer, "first", DOCUMENT)
    asked = [*draw(2, 20), *DOCUMENT]
    there, here = ask(reader, "second", asked), ask(writer, "third", asked)
    assert there.receipt.reused_tokens == here.receipt.reused_tokens > 100
    assert there.tokens == here.tokens


def test_donors_outlive_the_engine_that_made_them(start):
    writer = start()
    ask(writer, "first", DOCUMENT)
    writer.reuse.directory.close()
    assert ask(start(), "second", [*draw(2, 20), *DOCUMENT]).receipt.reused_tokens > 100


@pytest.mark.parametrize("other", [{"seed": 1}, {"bits": 8}, {"name": "another"}])
def test_other_weights_bits_and_models_share_nothing(start, other):
    ask(start(), "first", DOCUMENT)
    done = ask(start(**other), "second", [*draw(2, 20), *DOCUMENT])
    assert done.receipt.reused_tokens == 0


def test_a_donor_is_of_its_tenant_alone(start):
    writer, reader = start(), start()
    ask(writer, "first", DOCUMENT, tenant="one")
    asked = [*draw(2, 20), *DOCUMENT]
    assert ask(reader, "second", asked, tenant="two").receipt.reused_tokens == 0
    assert ask(reader, "third", asked, tenant="one").receipt.reused_tokens > 100


def test_a_request_named_like_a_published_donor_takes_nobodys_place(start):
    writer, reader = start(), start()
    ask(writer, "first", DOCUMENT, tenant="one")
    ask(reader, "looks around", draw(9, 100), tenant="two")
    key = next(donor.donor_id for donor in reader.reuse.semblend.donors() if donor.namespace.tenant == "one")
    ask(reader, key, draw(5, 100), tenant="two")
    assert ask(reader, "third", [*draw(2, 20), *DOCUMENT], tenant="one").receipt.reused_tokens > 100


def test_a_damaged_file_is_computed_instead(start, tmp_path):
    writer = start()
    cold = ask(start(name="cold"), "cold", [*draw(2, 20), *DOCUMENT], quality="exact")
    ask(writer, "first", DOCUMENT)
    for file in (tmp_path / "shared").glob("*.kv"):
        content = bytearray(file.read_bytes())
        content[-200] ^= 0xFF
        file.write_bytes(content)
    done = ask(start(), "second", [*draw(2, 20), *DOCUMENT])
    assert done.receipt.reused_tokens == 0
    assert done.tokens == cold.tokens


def test_flushing_one_engine_leaves_the_neighbours_donors_to_others(start):
    one, two = start(), start()
    ask(one, "first", DOCUMENT)
    asked = [*draw(2, 20), *DOCUMENT]
    ask(two, "looks around", draw(9, 100))
    two.reuse.forget_donors()
    two.reset_prefix_cache()
    assert ask(two, "second", asked, quality="fast").receipt.reused_tokens == 0
    assert ask(start(), "third", asked).receipt.reused_tokens > 100


def test_a_server_that_starts_knows_every_donor_in_the_folder(start):
    writer = start()
    for number in range(40):
        ask(writer, f"document {number}", draw(100 + number, 64))
    assert len(start().reuse.semblend.donors()) == 40
