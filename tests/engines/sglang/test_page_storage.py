"""Our HiCache storage as SGLang's threads call it, with SGLang's own classes and no engine around it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from semblend.errors import ConfigError
from semblend.integration.sglang import plugin

KEYS = ["a" * 64, "b" * 64, "c" * 64]


class MHATokenToKVPoolHost:
    dtype, layout, page_size, layer_num, head_num, head_dim, v_head_dim = torch.float32, "layer_first", 4, 2, 1, 8, 8


class MLATokenToKVPoolHost(MHATokenToKVPoolHost):
    pass


def make_config(folder, **extra):
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="m",
        extra_config={"directory": str(folder)} | extra,
    )


def make_storage(config, pool=MHATokenToKVPoolHost):
    from semblend.integration.sglang.hicache.page_storage import SemBlendPages

    storage = SemBlendPages(config, {})
    storage.register_mem_pool_host(pool())
    return storage


@pytest.fixture
def model(monkeypatch):
    """The model of an engine in this process."""
    found = torch.nn.Linear(8, 8)
    configuration = SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1e4}))
    runner = SimpleNamespace(model=found, model_config=configuration)
    monkeypatch.setattr(plugin, "_noted", lambda: runner)
    return found


def page(number: int) -> torch.Tensor:
    return torch.full((128,), float(number))


def fetch(storage, keys):
    return storage.batch_get(keys, [torch.zeros(128) for _ in keys])


def test_pages_are_counted_and_fetched_up_to_the_first_gap(tmp_path, model):
    storage = make_storage(make_config(tmp_path / "p"))
    assert storage.batch_set([KEYS[0], KEYS[2]], [page(1), page(3)])
    assert storage.batch_exists(KEYS) == 1
    first, *rest = fetch(storage, KEYS)
    assert torch.equal(first, page(1))
    assert rest == [None, None]
    assert storage.exists(KEYS[2])
    assert torch.equal(storage.get(KEYS[2], torch.zeros(128)), page(3))


@pytest.mark.parametrize(
    "rank", [{"tp_rank": 1, "tp_size": 2}, {"pp_size": 2}, {"dp_rank": 1}, {"model_name": "other"}]
)
def test_another_rank_or_model_sees_nothing(tmp_path, model, rank):
    config = make_config(tmp_path / "p")
    make_storage(config).set(KEYS[0], page(1))
    assert make_storage(config).batch_exists(KEYS) == 1
    assert make_storage(replace(config, **rank)).batch_exists(KEYS) == 0


def test_other_weights_and_another_rotation_see_nothing(tmp_path, model, monkeypatch):
    config = make_config(tmp_path / "p")
    make_storage(config).set(KEYS[0], page(1))
    runner = plugin.find_runner()
    monkeypatch.setattr(runner.model_config.hf_text_config, "to_dict", lambda: {"rope_theta": 5e5})
    assert make_storage(config).batch_exists(KEYS) == 0
    monkeypatch.undo()
    model.weight.data.add_(1)
    monkeypatch.setattr(plugin, "_noted", lambda: runner)
    assert make_storage(config).batch_exists(KEYS) == 0


def test_new_weights_in_a_running_engine_end_storing_and_fetching(tmp_path, model):
    storage = make_storage(make_config(tmp_path / "p"))
    storage.set(KEYS[0], page(1))
    model.weight.data.add_(1)
    assert not storage.set(KEYS[1], page(2))
    assert storage.batch_exists(KEYS) == 0
    assert fetch(storage, KEYS) == [None] * 3
    assert len(list((tmp_path / "p").glob("*.page"))) == 1


def test_without_sight_of_the_weights_it_does_not_attach_unless_they_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(plugin, "_noted", None)
    with pytest.raises(ConfigError, match="weights"):
        make_storage(make_config(tmp_path / "p"))
    assert make_storage(make_config(tmp_path / "p", weights="release 7")).set(KEYS[0], page(1))


def test_engines_with_other_pools_are_refused(tmp_path, model):
    from sglang.srt.mem_cache.hicache_storage import PoolName

    with pytest.raises(ConfigError, match="MLATokenToKVPoolHost"):
        make_storage(make_config(tmp_path / "p"), MLATokenToKVPoolHost)
    with pytest.raises(ConfigError, match="MLA"):
        make_storage(replace(make_config(tmp_path / "p"), is_mla_model=True))
    with pytest.raises(ConfigError, match="mamba"):
        make_storage(make_config(tmp_path / "p")).register_mem_host_pool_v2(None, PoolName.MAMBA)


@pytest.mark.parametrize("extra", [{"directory": ""}, {"max_bytes": "many"}, {"max_bytes": 0}, {"weights": 7}])
def test_options_that_make_no_sense_are_refused_with_a_hint(tmp_path, extra):
    with pytest.raises(ConfigError) as stopped:
        make_storage(make_config(tmp_path / "p", **extra))
    assert stopped.value.hint


@pytest.mark.parametrize("broken", ["holds", "read_into", "write", "close"])
def test_a_folder_that_fails_is_a_miss_and_ends_no_thread_of_sglang(tmp_path, model, broken, monkeypatch, caplog):
    from semblend.materialize.donors.store import PageFiles

    def fail(*args, **more):
        raise OSError(5, "Input/output error")

    storage = make_storage(make_config(tmp_path / "p"))
    assert storage.batch_set(KEYS, [page(n) for n in range(3)])
    monkeypatch.setattr(PageFiles, broken, fail)
    stored, found = storage.batch_exists(KEYS), fetch(storage, KEYS)
    kept = storage.batch_set(["d" * 64], [page(4)])
    storage.close()
    assert (stored, found[0] is None, kept) == (
        0 if broken == "holds" else 3, broken == "read_into", broken not in ("holds", "write")
    )  # fmt: skip
    assert "Input/output error" in caplog.text


def test_weights_that_cannot_be_looked_at_end_no_thread_of_sglang(tmp_path, model, monkeypatch):
    from semblend.materialize.weights_watch import WeightsWatch

    storage = make_storage(make_config(tmp_path / "p"))
    assert storage.batch_set(KEYS, [page(n) for n in range(3)])
    monkeypatch.setattr(WeightsWatch, "have_changed", lambda self: 1 / 0)
    assert storage.batch_exists(KEYS) == 0
    assert fetch(storage, KEYS) == [None] * 3
    assert not storage.batch_set(KEYS, [page(n) for n in range(3)])
