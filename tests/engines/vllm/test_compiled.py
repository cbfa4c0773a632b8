"""A model that vLLM has compiled: passes of ours run outside of its code, and leave it as it was."""

from __future__ import annotations

import shutil

import pytest
import small_folders
import torch
from cpu_features import needs_bf16
from vllm_world import MODEL, make_world, serve

pytestmark = [
    needs_bf16,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU: apt install g++"
    ),
]


@pytest.fixture(scope="module")
def compiled_engine(small_model, tmp_path_factory):
    """gpt-oss has tables of cosines in float32, whatever type its queries have."""
    folder = small_folders.write("sinks", tmp_path_factory.mktemp("compiled") / "model", MODEL)
    engine = {"dtype": "bfloat16", "enforce_eager": False, "disable_hybrid_kv_cache_manager": True}
    with pytest.MonkeyPatch.context() as patched, torch._dynamo.config.patch(disable=False):
        patched.setenv("TORCHDYNAMO_DISABLE", "0")  # other engines of tests are not compiled
        world = make_world(str(folder), engine, **small_model[1])
        yield world
        world.core.shutdown()


@pytest.fixture
def compiled(compiled_engine):
    yield from serve(compiled_engine)


def list_tables(world):
    """The type and the place in memory of each table of cosines."""
    return world.llm.apply_model(
        lambda model: [
            (table.dtype, table.data_ptr())
            for module in model.modules()
            for name, table in module._buffers.items()
            if "cos_sin_cache" in name
        ]
    )[0]


def test_the_tables_that_compiled_code_reads_stay_where_they_are(compiled):
    """vLLM's rotation replaces a table of another type than its queries where it runs outside of compiled code.

    The compiled code then read 16-bit numbers as 32-bit ones: every key of every request was wrong.
    """
    before = list_tables(compiled)
    assert {dtype for dtype, _ in before} == {torch.float32}, "our check at the start has run already"
    document = compiled.document(1)
    target = compiled.instruction(5) + document + compiled.question()
    cold = compiled.cold(target)
    compiled.ask(compiled.instruction(1) + document + compiled.question())
    (output,) = compiled.ask(target)
    receipt = compiled.receipt(output)
    assert receipt["outcome"] == "backend_materialized_reuse", compiled.audited(output)["detail"]
    assert receipt["canary"] < 0.02
    (keys, _), (cold_keys, _) = compiled.kv_of(output)[0], compiled.kv_of(cold)[0]
    assert float((keys - cold_keys).abs().max()) < 0.02 * float(cold_keys.abs().max())
    assert list_tables(compiled) == before
