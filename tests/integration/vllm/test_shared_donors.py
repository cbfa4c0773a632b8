"""Two engines of one machine without vLLM: what one computes the other reuses, and nothing else crosses over."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from naive_engine import NaiveEngine

from semblend import Namespace, Prompt, ReusePlan, SemBlend, SemBlendConfig
from semblend.integration.vllm.orders import Load, Orders
from semblend.integration.vllm.scheduler.records import Record
from semblend.integration.vllm.scheduler.worker_donors import WorkerDonors
from semblend.integration.vllm.worker.worker_connector import WorkerConnector
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.contract import Rows, slots_of_blocks
from semblend.materialize.donors.directory import GENERATION, SharedDonors, is_key
from semblend.materialize.donors.directory_kv import DirectoryKv, KvSignature
from semblend.materialize.donors.store import PrivateFolder
from semblend.materialize.gate.observers import EIGHT_BIT_TOLERANCE
from semblend.session.session import SessionRequest

BLOCK = 16
DOCUMENT = list(range(100, 180))
MODEL = Namespace(model="m")
FACTS = SimpleNamespace(block_tokens=BLOCK, hash_block_tokens=BLOCK)


class MachineEngine:
    """Both halves of an engine on the fake model; ``ask`` is a request from lookup to the worker's report."""

    def __init__(self, path, *, bits=16, weights="w", namespace=MODEL, budget=1 << 22, host=1 << 24):
        self.namespace, self.failures = namespace, []
        self.model = NaiveEngine.make(slots=64 * BLOCK, vocabulary=1000)
        layout = self.model.layout
        self.semblend = SemBlend(SemBlendConfig(embedder="none", max_bytes=1 << 24))
        self.books = WorkerDonors(self.semblend, lambda *told: self.failures.append(told), FACTS)
        token_bytes = 2 * layout.layers * layout.kv_heads * layout.head_dim * 4
        self.books.shared = SharedDonors(str(path), budget, namespace, token_bytes=token_bytes, every_s=0.0)
        signature = KvSignature(
            weights, "float32", layout.layers, layout.kv_heads, layout.head_dim, bits, self.model.rope
        )
        quality = QualitySettings(
            mode="fast", first_seam_tokens=4, seam_tokens=4, canary_tolerance=EIGHT_BIT_TOLERANCE if bits == 8 else None
        )
        self.worker = WorkerConnector(
            self.model, BLOCK, quality, host_bytes=host, donor_bits=bits,
            directory=DirectoryKv(PrivateFolder(path), signature),
        )  # fmt: skip

    def prompt(self, tokens, salt=""):
        return Prompt(tokens, namespace=replace(self.namespace, salt=salt, tenant=salt))

    def compute(self, name, tokens, salt=""):
        """A request that is computed cold and becomes a donor."""
        at, blocks = torch.arange(len(tokens)), tuple(range(-(-len(tokens) // BLOCK)))
        self.model.forward(Rows.of(tokens, at, slots_of_blocks(blocks, BLOCK, len(tokens))))
        record = Record(
            SessionRequest(name, self.prompt(tokens, salt), source=SimpleNamespace(block_hashes=[])), "fast"
        )
        record.block_ids = list(blocks)
        self.step(Orders(captures=[self.books.order(record, len(tokens))]))
        self.step(Orders())  # the one that begins with the copy
        self.step(Orders(publications=self.books.take_publications(), drops=self.books.take_drops()))
        self.worker._publisher.flush()

    def step(self, orders):
        self.worker.before_step(orders)
        self.worker.load(orders)
        self.worker.capture(orders)
        report = self.worker.take_report()
        if report is not None:
            for key in report.captured:
                self.books.note_captured(*key)
            for key in report.not_captured:
                self.books.note_not_captured(*key)
            for key in report.evicted:
                self.books.note_lost(*key)
        return report

    def find(self, tokens, salt=""):
        self.books.look_around()
        return self.semblend.lookup(self.prompt(tokens, salt))

    def ask(self, tokens, salt=""):
        """Ask as often as it takes: a donor that nobody has verified here is not loaded, but verified."""
        answer = self.ask_once(tokens, salt)
        if answer[0].reason == "capacity":
            self.worker.donor_kv.flush()
            answer = self.ask_once(tokens, salt)
        return answer

    def ask_once(self, tokens, salt=""):
        plan = self.find(tokens, salt)
        assert isinstance(plan, ReusePlan), plan
        self.books.note_used(plan.donor_ids)
        spans = tuple(replace(one, generation=self.books.find_generation(one.donor_id)) for one in plan.spans)
        load = Load("r", torch.tensor(tokens).numpy(), tuple(range(20, 40)), 0, len(tokens), spans, "fast")
        report = self.step(Orders(loads=[load]))
        context = slots_of_blocks(range(20, 40), BLOCK, len(tokens))
        kv = [tuple(part.clone() for part in self.model.layout.gather(n, context)) for n in range(2)]
        return report.loaded["r"], kv

    def close(self):
        self.worker.close()
        self.books.close()
        self.semblend.close()


@pytest.fixture
def machine(tmp_path):
    engines = []

    def start(**options):
        engines.append(MachineEngine(tmp_path / "donors", **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


TOLD, ASKED = [1, 2, 3, *DOCUMENT], [7, 8, 9, 10, 11, *DOCUMENT, 12]


@pytest.mark.parametrize("bits", [16, 8])
def test_what_one_engine_computed_another_reuses_as_the_first_would(machine, bits):
    one, two = machine(bits=bits), machine(bits=bits)
    one.compute("req", TOLD)
    ours, our_kv = one.ask(ASKED)
    theirs, their_kv = two.ask(ASKED)
    assert theirs.reason is None
    assert (theirs.reused_tokens, theirs.recomputed_tokens) == (ours.reused_tokens, ours.recomputed_tokens)
    assert theirs.reused_tokens > 60
    for mine, other in zip(our_kv, their_kv, strict=True):
        assert torch.equal(mine[0], other[0])
        assert torch.equal(mine[1], other[1])
    assert two.worker.donor_kv.holders == 0


def test_the_first_to_want_a_donor_that_nobody_has_verified_computes_and_no_step_reads_its_file(machine, monkeypatch):
    one, two = machine(), machine()
    one.compute("req", TOLD)
    reads, go, step = [], threading.Event(), threading.current_thread()

    def read(descriptor, header):
        assert go.wait(300)
        reads.append(threading.current_thread())

    monkeypatch.setattr("semblend.materialize.donors.directory_kv.read_payload", read)
    loaded, _ = two.ask_once(ASKED)
    assert (loaded.reason, loaded.reused_tokens) == ("capacity", 0)
    go.set()
    two.worker.donor_kv.flush()
    assert two.ask_once(ASKED)[0].reused_tokens > 60
    assert reads
    assert step not in reads


def test_a_donor_of_another_salt_is_not_found_through_the_directory(machine):
    one, two = machine(), machine()
    one.compute("req", TOLD, salt="acme")
    assert not isinstance(two.find(ASKED), ReusePlan)
    assert not isinstance(two.find(ASKED, salt="bolt"), ReusePlan)
    assert isinstance(two.find(ASKED, salt="acme"), ReusePlan)


def test_kv_of_other_weights_under_one_name_is_refused_and_not_tried_again(machine):
    one, two = machine(), machine(weights="other")
    one.compute("req", TOLD)
    loaded, _ = two.ask(ASKED)
    assert (loaded.reason, loaded.reused_tokens) == ("stale", 0)
    assert not isinstance(two.find(ASKED), ReusePlan)
    assert one.ask(ASKED)[0].reused_tokens > 60


class ToldWeights:
    """Weights with a name; ``changed`` once they are others."""

    digest, changed = "w", False

    def have_changed(self, look=None):
        changed, self.changed = self.changed, False
        return changed

    def begin_look(self):
        changed = self.changed
        return lambda: changed


def test_the_first_request_finds_the_neighbours_donors_by_the_weights_that_were_told_at_the_start(machine):
    one, two = machine(), machine()
    one.compute("req", TOLD)
    two.worker._watch_weights = ToldWeights
    assert two.worker.tell_weights() == "w"
    assert two.ask(ASKED)[0].reused_tokens > 60


def test_weights_that_are_written_between_start_and_first_request_get_no_donors_of_the_old_ones(machine):
    one, two = machine(), machine()
    one.compute("req", TOLD)
    two.worker._watch_weights = ToldWeights
    two.worker.tell_weights()
    two.worker._weights.changed, two.worker._weights.digest = True, "other"
    loaded, _ = two.ask(ASKED)
    assert (loaded.reason, loaded.reused_tokens) == ("stale", 0)


def test_a_donor_of_new_weights_that_nobody_has_noticed_yet_is_not_published(machine, tmp_path):
    one = machine()
    one.worker._watch_weights = ToldWeights
    one.worker.load(Orders())
    one.worker._weights.changed = True
    one.compute("req", TOLD)
    assert not list((tmp_path / "donors").glob("*.kv"))
    assert not isinstance(machine().find(ASKED), ReusePlan)


def test_a_damaged_file_costs_a_refusal_and_nobody_tries_it_again(machine, tmp_path):
    one, two, three = machine(), machine(), machine()
    one.compute("req", TOLD)
    (path,) = (tmp_path / "donors").glob("*.kv")
    path.write_bytes(path.read_bytes()[:-64] + b"x" * 64)
    loaded, _ = two.ask_once(ASKED)
    assert (loaded.reason, loaded.reused_tokens) == ("capacity", 0)
    two.worker.donor_kv.flush()
    assert not isinstance(two.find(ASKED), ReusePlan)
    assert not isinstance(three.find(ASKED), ReusePlan)


def test_a_tenants_burst_pushes_nobody_else_out_of_host_memory_or_directory(machine, tmp_path):
    size = 2 * 2 * 2 * 16 * 4 * 100
    one = machine(host=4 * size, budget=4 * size)
    one.compute("quiet", TOLD, salt="quiet")
    for start in range(200, 900, 85):
        one.compute(f"loud {start}", [5, *range(start, start + 80)], salt="loud")
    assert one.find(ASKED, "quiet").donor_ids == ("quiet",), "in host memory"
    assert machine().ask(ASKED, "quiet")[0].reused_tokens > 60, "in the directory"
    held = one.worker.donor_kv.used_bytes["host"]
    assert 2 * size < held <= 4 * size, "the burst has had to make room, and made it itself"


def test_a_donor_outlives_its_engine(machine):
    one, two = machine(), machine()
    one.compute("req", TOLD)
    one.close()
    assert two.ask(ASKED)[0].reused_tokens > 60
    assert machine().ask(ASKED)[0].reused_tokens > 60


def test_an_engine_reads_its_own_donor_back_when_host_memory_has_lost_it(machine):
    one = machine()
    one.compute("req", TOLD)
    assert one.find(ASKED).donor_ids == ("req",)
    one.worker.donor_kv.drop("req")
    one.books.note_lost("req", one.books.find_generation("req"))
    plan = one.find(ASKED)
    assert is_key(plan.donor_ids[0])
    assert one.books.find_generation(plan.donor_ids[0]) == GENERATION
    assert one.ask(ASKED)[0].reused_tokens > 60


def test_a_forgotten_donor_leaves_the_directory_and_every_engine(machine):
    one, two = machine(), machine()
    one.compute("req", TOLD)
    plan = two.find(ASKED)
    two.semblend.forget(plan.donor_ids[0])  # an operator, at the neighbour's
    assert not isinstance(two.find(ASKED), ReusePlan)
    assert not isinstance(machine().find(ASKED), ReusePlan)


def test_a_reset_drops_own_donors_everywhere_and_the_neighbours_only_here(machine):
    one, two = machine(), machine()
    one.compute("a", TOLD)
    two.compute("b", [5, *range(300, 380)])
    assert isinstance(one.find([6, *range(300, 380)]), ReusePlan)
    one.books.forget_all()
    assert not isinstance(one.find([6, *range(300, 380)]), ReusePlan)
    assert not isinstance(one.find(ASKED), ReusePlan)
    assert not isinstance(two.find(ASKED), ReusePlan)
    assert isinstance(two.find([6, *range(300, 380)]), ReusePlan)
    assert isinstance(machine().find([6, *range(300, 380)]), ReusePlan)


def test_new_weights_make_the_neighbours_donors_void_until_they_have_them_too(machine):
    one, two = machine(), machine()
    one.compute("req", TOLD)
    assert isinstance(two.find(ASKED), ReusePlan)
    two.namespace = replace(MODEL, revision="trained further")
    two.books.follow(two.namespace)
    assert not isinstance(two.find(ASKED), ReusePlan)
    assert [donor.namespace for donor in two.semblend.donors()] == []
    one.namespace = two.namespace
    one.books.follow(one.namespace)
    one.compute("again", [4, 5, 6, *DOCUMENT])
    assert isinstance(two.find(ASKED), ReusePlan)


def test_once_weights_are_known_a_donor_is_published_in_the_step_that_captures_it(machine):
    one, two = machine(), machine()
    one.books.follow(MODEL)
    one.compute("req", TOLD)
    assert one.books.take_publications() == []
    assert isinstance(two.find(ASKED), ReusePlan)


def test_an_engine_that_ends_with_its_last_answer_publishes_that_prompt(machine):
    one = machine()
    one.books.follow(MODEL)
    one.model.forward(Rows.of(TOLD, torch.arange(len(TOLD)), slots_of_blocks(range(6), BLOCK, len(TOLD))))
    record = Record(SessionRequest("req", one.prompt(TOLD), source=SimpleNamespace(block_hashes=[])), "fast")
    record.block_ids = list(range(6))
    one.step(Orders(captures=[one.books.order(record, len(TOLD))]))
    one.worker.close()
    assert machine().ask(ASKED)[0].reused_tokens > 0


def test_a_donor_that_could_not_be_captured_leaves_no_record(machine, tmp_path):
    one = machine(host=1)
    one.books.follow(MODEL)
    one.compute("req", TOLD)
    assert not list((tmp_path / "donors").glob("*.donor"))
    assert one.books.shared._writer.used_bytes == 0


def test_a_folder_that_goes_away_costs_the_sharing_and_no_request(machine, tmp_path):
    one = machine()
    one.compute("req", TOLD)
    shutil.rmtree(tmp_path / "donors")
    os.close(one.books.shared._folder._descriptor)
    assert isinstance(one.find(ASKED), ReusePlan), "its own donor"
    assert one.books.shared is None
    assert [where for where, _, _ in one.failures] == ["directory"]
    one.compute("more", [5, *range(300, 380)])
    assert isinstance(one.find([6, *range(300, 380)]), ReusePlan)


def test_a_restored_store_without_kv_plans_nothing(tmp_path):
    config = SemBlendConfig(embedder="none", store=str(tmp_path / "store.db"))
    with SemBlend(config) as before:
        before.register(Prompt(TOLD, namespace=MODEL), "req")
    for discovery_only, left in ((True, 1), (False, 0)):  # whoever only looks may look at what was
        with SemBlend(replace(config, discovery_only=discovery_only)) as after:
            WorkerDonors(after, lambda *_: None, FACTS)
            assert len(after.donors()) == left
