"""Where donors lie: what is decided at a start leaves the engine and the machine what they need."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semblend.config import GIB
from semblend.materialize.contract import KvLayout
from semblend.materialize.donors import memory
from semblend.materialize.donors.places import (
    DEVICE_MARGIN,
    MOST_HOST,
    UNKNOWN_HOST,
    choose_device_bytes,
    choose_host_bytes,
    describe_places,
    read_memory,
)
from semblend.materialize.donors.tiers import DonorKv

sizes = st.integers(0, 1 << 41)


@given(sizes, st.integers(1, 16))
def test_all_ranks_together_take_at_most_a_quarter_of_the_free_host_memory(available, ranks):
    chosen = choose_host_bytes(available, ranks)
    assert 0 <= chosen * ranks <= available // 4
    assert chosen <= MOST_HOST


def test_a_system_that_does_not_say_gets_what_it_always_had():
    assert choose_host_bytes(None) == UNKNOWN_HOST == 4 * GIB


@given(sizes, sizes, st.floats(0.1, 1.0))
def test_the_device_keeps_its_margin_and_vllm_all_of_its_share(free, total, share):
    free = min(free, total)
    chosen = choose_device_bytes(free, total, share)
    assert chosen >= 0
    if chosen:
        assert free - chosen >= DEVICE_MARGIN
        beyond = total - int(total * share)
        assert chosen <= min(free, beyond) / 2, "memory of vLLM's share that it does not use yet is not spare"
        assert chosen <= total / 20


@pytest.mark.parametrize(("free", "total", "share"), [(1, 16, 0.9), (3, 24, 0.9), (0, 80, 0.98), (40, 80, 1.0)])
def test_a_device_with_little_to_spare_holds_no_donors(free, total, share):
    assert choose_device_bytes(free * GIB, total * GIB, share) == 0


def test_a_second_engine_still_finds_its_half_of_the_device():
    first = choose_device_bytes(44 * GIB, 80 * GIB, 0.45)
    assert first > 0
    assert 44 * GIB - first >= 0.45 * 80 * GIB


def test_the_line_at_the_start_says_how_many_documents_fit():
    line = describe_places(4 * GIB, 16 * GIB, 57344, 57344 / 2)
    assert line == "4.0 GiB on the device (9 documents of 8,192 tokens), 16.0 GiB on the host (73)"
    assert describe_places(0, 4 * GIB, 57344, 57344).endswith("(9 documents of 8,192 tokens), none on the device")


def test_the_limit_of_a_container_counts_without_what_it_holds_of_files(tmp_path):
    (tmp_path / "memory.max").write_text(f"{8 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{6 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {3 << 20}\nactive_file 7\n")
    assert read_memory(tmp_path) == (8 << 20, 5 << 20)
    (tmp_path / "memory.max").write_text("max\n")
    assert read_memory(tmp_path)[0] != 8 << 20


def test_donors_get_memory_of_a_device_after_the_start_and_do_without_where_there_is_none(monkeypatch):
    gpu = torch.device("cuda", 0)
    kv = DonorKv(0, 4096, device_type="cpu")
    monkeypatch.setattr(memory, "device_memory", lambda nbytes, device: None)
    kv.give_device(gpu, 4096)
    assert kv.budgets["device"] == 0
    monkeypatch.setattr(memory, "device_memory", lambda nbytes, device: torch.empty(nbytes, dtype=torch.uint8))
    kv.give_device(gpu, 4096)
    layout = KvLayout.of_pool(torch.ones(2, 8, 1, 4), torch.ones(2, 8, 1, 4))
    assert kv.capture("d", 1, layout, torch.arange(4)).tier == "device"
    kv.check()
