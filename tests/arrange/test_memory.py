"""What an arranger remembers: bounded, fair between tenants, gone when evicted, and there again after a restart."""

from __future__ import annotations

import io
import logging
import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend import Namespace, Prompt
from semblend.arrange import Arranger, OrderLimits
from semblend.arrange.memory import SequenceMemory
from semblend.errors import InputError, StoreError


def send(arranger, passages, **asked):
    found = arranger.arrange(passages, **asked)
    arranger.record(found)
    return found


def test_a_tenant_that_floods_pushes_out_its_own():
    arranger = Arranger(most_passages=40)
    for number in range(5):
        send(arranger, [f"kept {number}", "and this"], namespace=Namespace(tenant="quiet"))
    for number in range(200):
        salted = Namespace(tenant="loud", salt=f"salt {number}")
        send(arranger, [f"flood {number}", f"more {number}"], namespace=salted)
    for number in range(5):
        met = arranger.arrange([f"kept {number}", "and this"], namespace=Namespace(tenant="quiet"))
        assert met.expected.unseen == 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "drop", "cut"]),
        st.sampled_from(["a", "b", "c"]),
        st.lists(st.sampled_from("uvwxyz"), min_size=1, max_size=5),
        st.integers(0, 3),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=80)
def test_the_memory_never_contradicts_itself(steps):
    arranger = Arranger(most_passages=30)
    for what, tenant, passages, kept in steps:
        namespace = Namespace(tenant=tenant)
        if what == "add":
            send(arranger, passages, namespace=namespace, keep=OrderLimits(within=0))
        else:
            arranger.forget(passages, namespace, kept=kept if what == "cut" else None)
        check(arranger._memory)


def check(memory: SequenceMemory):
    sequences = list(memory)
    assert memory.passages == sum(len(sent.keys) for sent in sequences) <= 30
    assert sum(memory._held_by.values()) == memory.passages
    assert all(memory._held_by.values())
    assert {name for names in memory._owners.values() for name in names} == {sent.name for sent in sequences}
    ends = []
    for root, top in memory._roots.items():
        stack = [(top, ())]
        while stack:
            node, path = stack.pop()
            through = [sent for sent in sequences if sent.root == root and sent.keys[: len(path)] == path]
            assert node.uses == len(through) > 0
            if node.ends is not None:
                ends.append(node.ends)
                assert any(sent.name == node.ends and sent.keys == path for sent in through)
            stack.extend((child, (*path, key)) for key, child in node.children.items())
    assert sorted(ends) == sorted(sent.name for sent in sequences)
    held: dict[bytes, dict[bytes, set]] = {}
    for sent in sequences:
        for key in sent.keys:
            held.setdefault(sent.scope, {}).setdefault(key, set()).add(sent)
    assert {scope: {key: set(by) for key, by in keys.items()} for scope, keys in memory._holders.items()} == held


def test_forgetting_reaches_what_goes_on_behind_and_any_beginning_unless_one_is_named():
    arranger = Arranger()
    for before in ("one", "two"):
        for passages in (["a", "b"], ["a", "b", "c"], ["a", "d"]):
            send(arranger, passages, before=before, keep=OrderLimits(within=0))
    assert arranger.forget(["a", "b"], before="one")
    assert arranger.arrange(["a", "b", "c"], before="one").expected.exact == 1
    assert arranger.arrange(["a", "b", "c"], before="two").expected.exact == 3
    assert arranger.forget(["a", "b"])
    assert arranger.arrange(["a", "b", "c"], before="two").expected.exact == 1
    assert not arranger.forget(["a", "b"])
    assert not arranger.forget([])


def test_what_the_engine_still_holds_of_an_evicted_prompt_is_kept():
    arranger = Arranger(count=lambda passage: 1)
    send(arranger, ["a", "b", "c", "d"])
    assert arranger.forget(["a", "b", "c", "d"], kept=2)
    assert arranger.arrange(["d", "c", "b", "a"]).expected.exact == 2
    assert arranger.arrange(["d"]).expected.unseen == 1


def test_a_beginning_that_the_exact_cache_has_dropped_by_now_is_not_expected_there():
    arranger = Arranger(count=lambda passage: 1, exact_size=4)
    send(arranger, ["a", "b"])
    send(arranger, ["c", "d"])
    assert arranger.arrange(["b", "a"]).expected.exact == 2
    send(arranger, ["e", "f"])
    stale = arranger.arrange(["b", "a"])
    assert (stale.expected.exact, stale.expected.elsewhere) == (0, 2)
    assert stale.order == (1, 0), "a donor may still hold it in that order"
    assert arranger.arrange(["d", "c"]).expected.exact == 2


def test_passages_may_be_tokens_and_never_meet_a_text():
    arranger = Arranger()
    send(arranger, [Prompt([1, 2, 3]), Prompt([4, 5])])
    met = arranger.arrange([Prompt([4, 5]), Prompt([1, 2, 3])])
    assert (met.order, met.expected.exact) == ((1, 0), 5)
    assert arranger.arrange([Prompt([1, 2, 3]).token_ids.tobytes().decode()]).expected.unseen


@pytest.mark.parametrize("scores", [[float("inf"), 1.0], [-1.0, 1.0], [float("nan"), 0.0]])
def test_scores_that_no_bound_can_hold_are_refused(scores):
    with pytest.raises(InputError):
        Arranger().arrange(["a", "b"], scores=scores, keep=OrderLimits(displaced=0.1))


def test_ten_thousand_passages_are_arranged_under_every_kind_of_keep():
    arranger = Arranger()
    many = [f"passage {number}" for number in range(10_000)]
    send(arranger, many[::-1])
    for number in range(300):
        send(arranger, many[number::-1][:20])
    for keep in (OrderLimits(), OrderLimits(within=7), OrderLimits(first=3, last=4), OrderLimits(within=0)):
        order = arranger.arrange(many, keep=keep).order
        assert sorted(order) == list(range(10_000))
    same = arranger.arrange(["same"] * 10_000)
    assert len(same.repeats) == 9_999
    assert arranger.arrange(["x" * 5_000_000, ""]).expected.unseen == 5_000_000
    assert arranger.arrange([]).order == ()


class TestFile:
    def test_the_memory_survives_a_restart_with_what_was_forgotten(self, tmp_path):
        with_file = Arranger(path=tmp_path / "orders")
        send(with_file, ["a", "b"], namespace=Namespace(tenant="t"), before="x")
        send(with_file, ["c", "d"])
        send(with_file, ["e", "f"])
        with_file.forget(["c", "d"])
        with_file.forget(["e", "f"], kept=1)
        with_file.close()
        again = Arranger(path=tmp_path / "orders")
        assert len(again) == 2
        assert again.arrange(["b", "a"], namespace=Namespace(tenant="t"), before="x").order == (1, 0)
        assert again.arrange(["d", "c"]).expected.unseen == 2
        assert again.arrange(["f", "e"]).expected.exact == 1
        again.close()

    def test_a_kill_in_the_middle_of_a_write_costs_the_last_sequence_at_most(self, tmp_path, caplog):
        path = tmp_path / "orders"
        arranger = Arranger(path=path)
        ends = [path.stat().st_size]
        for number in range(3):
            send(arranger, [f"a{number}", f"b{number}"])
            ends.append(path.stat().st_size)
        arranger.close()
        whole = path.read_bytes()
        for length in sorted({*ends, *range(ends[0], len(whole), 5)}):
            path.write_bytes(whole[:length])
            caplog.clear()
            again = Arranger(path=path)
            assert len(again) == sum(end <= length for end in ends[1:])
            assert bool(caplog.records) == (length not in ends)
            again.close()

    def test_a_damaged_byte_is_never_read_as_an_order(self, tmp_path, caplog):
        path = tmp_path / "orders"
        arranger = Arranger(path=path)
        send(arranger, ["a", "b"])
        send(arranger, ["c", "d"])
        arranger.close()
        whole = path.read_bytes()
        for at in range(0, len(whole), 3):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
            caplog.clear()
            again = Arranger(path=path)
            assert len(again) < 2
            assert "damaged" in caplog.text or "set aside" in caplog.text
            again.close()

    @pytest.mark.parametrize("content", [b"semblend.arrange 1\nmore", b"\x00\xff a picture"])
    def test_a_file_of_another_kind_or_version_is_set_aside_with_a_warning(self, tmp_path, caplog, content):
        path = tmp_path / "orders"
        path.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            arranger = Arranger(path=path)
        assert len(arranger) == 0
        assert "set aside" in caplog.text
        (aside,) = tmp_path.glob("orders.set-aside-*")
        assert aside.read_bytes() == content
        arranger.close()

    def test_it_is_written_anew_before_it_outgrows_what_is_remembered(self, tmp_path):
        path = tmp_path / "orders"
        arranger = Arranger(path=path, most_passages=10)
        for number in range(2_000):
            send(arranger, [f"a{number}", f"b{number}"])
        assert path.stat().st_size < 2 * 1_024 * 100
        arranger.close()
        with Arranger(path=path, most_passages=10) as again:
            assert len(again) == 5

    def test_only_its_owner_may_read_it_and_only_one_arranger_may_have_it(self, tmp_path):
        arranger = Arranger(path=tmp_path / "orders")
        assert stat.S_IMODE(os.stat(tmp_path / "orders").st_mode) == 0o600
        with pytest.raises(StoreError, match="another arranger"):
            Arranger(path=tmp_path / "orders")
        arranger.close()
        Arranger(path=tmp_path / "orders").close()

    def test_a_disk_that_fails_is_told_once_and_costs_no_order(self, tmp_path, caplog):
        arranger = Arranger(path=tmp_path / "orders")
        arranger._file._file.close()
        arranger._file._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        send(arranger, ["a", "b"])
        send(arranger, ["c", "d"])
        assert arranger.arrange(["d", "c"]).expected.exact == 2
        assert caplog.text.count("not written any more") == 1
        arranger.close()

    def test_a_disk_that_takes_half_of_an_entry_is_written_no_more_so_that_no_later_entry_is_lost_behind_it(
        self, tmp_path, caplog
    ):
        class AlmostFull(io.FileIO):
            def write(self, entry):
                return super().write(entry[: len(entry) // 2])

        arranger = Arranger(path=tmp_path / "orders")
        send(arranger, ["a", "b"])
        arranger._file._file.close()
        arranger._file._file = AlmostFull(tmp_path / "orders", "ab")
        send(arranger, ["c", "d"])
        send(arranger, ["e", "f"])
        arranger.close()
        assert caplog.text.count("not written any more") == 1
        with Arranger(path=tmp_path / "orders") as again:
            assert again.arrange(["b", "a"]).expected.exact == 2
            assert len(again) == 1

    def test_a_link_where_the_new_file_is_written_leads_nowhere(self, tmp_path):
        victim = tmp_path / "victim"
        victim.write_text("mine")
        (tmp_path / f".orders.{os.getpid()}.part").symlink_to(victim)
        Arranger(path=tmp_path / "orders").close()
        assert victim.read_text() == "mine"
        assert not (tmp_path / "orders").is_symlink()

    def test_a_place_that_cannot_be_used_is_named(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match="cannot"):
            Arranger(path=tmp_path / "file" / "orders")
