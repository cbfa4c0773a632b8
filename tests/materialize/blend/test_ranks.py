"""Several ranks hold parts of one model: whatever each of them sees, they must do the same."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
import torch
from naive_engine import NaiveEngine

from semblend.errors import RankError
from semblend.materialize.blend import blender as blending
from semblend.materialize.blend.blender import Blender
from semblend.materialize.blend.quality import Placed, QualitySettings
from semblend.materialize.contract import Capabilities, Rows
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.gate.thresholds import Thresholds
from semblend.plan.reuse_plan import Decline, ReusePlan
from semblend.span import Span

DOCUMENT = [7 * i % 31 for i in range(160)]
DONOR, TARGET = [1, 2, 3, *DOCUMENT], [4, 5, 6, 7, 8, *DOCUMENT, 9]
PLAN = ReusePlan((Span("d", 3, 5, len(DOCUMENT)),), len(TARGET))


class Table:
    """Two ranks at one table: nobody goes on before both have spoken."""

    def __init__(self):
        self.said, self.barrier = [None, None], threading.Barrier(2, timeout=300)

    def round(self, rank, values, how):
        self.said[rank] = values.float()
        self.barrier.wait()
        both = torch.stack(self.said)
        found = both.amax(0) if how == "max" else both.mean(0)
        self.barrier.wait()
        return found


@dataclass(eq=False)
class RankEngine(NaiveEngine):
    """Another part of the model on each rank: other weights, so other attention and other deviations."""

    rank: int = 0
    shared: Table = field(default_factory=Table)

    def agree(self, values, how):
        return self.shared.round(self.rank, values, how)


def blenders(ranks=2, without_donor=(), **settings):
    table, made = Table(), []
    for rank in range(2):
        plain = NaiveEngine.make(slots=512, seed=1 + rank, capabilities=Capabilities(ranks=ranks, rank=rank))
        engine = RankEngine(**vars(plain), rank=rank, shared=table)
        kv, slots = DonorKv(0, 1 << 24), torch.arange(len(DONOR))
        blender = Blender(engine, kv, QualitySettings(**settings))
        engine.forward(Rows.of(DONOR, slots, slots))
        if rank not in without_donor:
            kv.capture("d", 0, engine.layout, slots)
        engine.passes.clear()
        made.append(blender)
    return made


def prepared(made, mode):
    """Both ranks at once, as an engine's workers."""
    found = [None, None]

    def work(rank):
        try:
            found[rank] = made[rank].prepare(Placed(TARGET, torch.arange(200, 200 + len(TARGET))), PLAN, mode=mode)
        except RankError as error:
            found[rank] = error
            made[rank].model.shared.barrier.abort()  # as the connection to a process that has ended

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return found


BALANCED = {"thresholds": Thresholds(1e9, 1e9, 1e9), "question_tokens": 4, "seam_tokens": 2, "first_seam_tokens": 2}


def test_ranks_that_see_different_attention_repair_the_same_tokens():
    made = blenders(**BALANCED)
    one, other = prepared(made, "balanced")
    assert one.decision == other.decision == "accepted"
    assert one.recomputed_runs == other.recomputed_runs
    assert made[0].model.passes == made[1].model.passes
    assert one.risk == other.risk


def test_without_agreement_they_would_not():
    made = blenders(ranks=1, **BALANCED)
    one, other = prepared(made, "balanced")
    assert one.recomputed_runs != other.recomputed_runs


@pytest.mark.parametrize("mode", ["fast", "balanced"])
def test_a_donor_that_one_rank_lost_is_nobodys(mode):
    made = blenders(without_donor={1})
    found = prepared(made, mode)
    assert [type(one) for one in found] == [Decline, Decline]
    assert {one.reason for one in found} == {"stale"}
    assert made[0].model.passes == made[1].model.passes == []
    assert made[0].donor_kv.holders == 0


def test_an_error_on_one_rank_ends_the_reuse_on_both(monkeypatch):
    made = blenders()
    monkeypatch.setattr(made[1].donor_kv, "acquire", lambda *key: 1 / 0)
    one, other = prepared(made, "fast")
    assert (one.reason, other.reason) == ("stale", "error")
    assert made[0].donor_kv.holders == 0


def test_wrong_kv_on_one_rank_is_refused_by_both():
    made = blenders()
    held = made[1].donor_kv.acquire("d", 0)
    held.k[0].mul_(2)
    made[1].donor_kv.release(held)
    assert {found.reason for found in prepared(made, "fast")} == {"validation_failed"}


def test_time_runs_out_for_all_ranks_or_for_none():
    made = blenders(**{**BALANCED, "thresholds": Thresholds(0, 0, 0), "latency_budget_ms": 1e6})
    made[0]._passes._rows_per_ms, made[1]._passes._rows_per_ms = 1e-6, 1e6  # one rank thinks that everything takes ages
    one, other = prepared(made, "balanced")
    assert one.decision == other.decision
    assert made[0].model.passes == made[1].model.passes


@pytest.mark.parametrize("mode", ["fast", "balanced"])
@pytest.mark.parametrize("place", ["forward", "logits"])
def test_a_rank_that_fails_in_a_pass_says_so_instead_of_leaving_the_others_alone(monkeypatch, mode, place):
    made = blenders()
    monkeypatch.setattr(made[1].model, place, lambda *given: 1 / 0)
    one, other = prepared(made, mode)
    assert "rank 1 of 2 failed while all of them computed reused KV: ZeroDivisionError" in str(other)
    assert "rank 0 of 2 failed" in str(one)
    assert "BrokenBarrierError" in str(one), "it was waiting for the other"
    assert all(blender.donor_kv.holders == 0 for blender in made)


def test_on_a_single_rank_the_same_failure_is_a_decline(monkeypatch):
    made = blenders(ranks=1)
    monkeypatch.setattr(made[1].model, "forward", lambda *given: 1 / 0)
    one, other = prepared(made, "fast")
    assert (one.decision, other.reason) == ("fast", "error")


def test_ranks_that_would_load_in_different_numbers_of_pieces_agree_first(monkeypatch):
    made = blenders(without_donor={1}, piece_ms=1.0)
    monkeypatch.setattr(blending, "STAGED_BYTES", 1)  # a piece for every token, on the rank that has the donor
    for blender in made:
        monkeypatch.setattr(blender, "_group_moves", lambda moves: [[move] for move in moves for _ in range(5)])
    found = prepared(made, "fast")
    assert [type(one) for one in found] == [Decline, Decline]
    assert {one.reason for one in found} == {"stale"}
