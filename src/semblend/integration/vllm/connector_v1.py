"""`SemBlendConnectorV1`: what vLLM loads. A facade: every hook is one call into our own side, and none of them raises.

vLLM makes one object in the scheduler's process and one in each worker's; each has the side of its role. A hook
that fails says so in the log and in an event, and answers as if there were no connector. The one exception: where one
of several tensor-parallel ranks fails in a pass of ours, the others wait for it: the engine stops (`rank_watch`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from semblend.confirm.metrics import make_metrics
from semblend.errors import RankError, SemBlendError
from semblend.integration.versions import VLLM
from semblend.integration.vllm import metrics as telemetry
from semblend.integration.vllm.orders import Orders, Report, join_digests
from semblend.integration.vllm.plugin import register
from semblend.integration.vllm.refusals import find_multi_connector, refusal
from semblend.integration.vllm.scheduler.admin import AdminSocket
from semblend.integration.vllm.scheduler.scheduler_connector import SchedulerConnector
from semblend.integration.vllm.scheduler.worker_donors import ResetWatch
from semblend.integration.vllm.settings import connector_settings
from semblend.integration.vllm.startup_checks import (
    choose_gate,
    engine_facts,
    make_semblend,
    make_worker_connector,
    open_admin,
    place_donors,
    share_donors,
)
from semblend.integration.vllm.worker.model_access import StockModel, find_runner_of_caller
from semblend.integration.vllm.worker.rank_watch import RankWatch, meet_ranks
from semblend.integration.vllm.worker.worker_connector import FailureLog, RefusingConnector, WorkerConnector
from semblend.materialize.gate.gate import OutcomeMemory

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32 vLLM does not ask where hits come from
    CacheHitSource = None

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
except ImportError:  # a version that nobody has looked at: it is refused, and its engine runs without us
    KVConnectorHandshakeMetadata, KVConnectorWorkerMetadata, SupportsHMA, KVConnectorPromMetrics, KVConnectorStats = (
        type(f"Unknown{number}", (), {}) for number in range(5)
    )

log = logging.getLogger("vllm.semblend")
Answer = TypeVar("Answer")
PACKAGE = Path(vllm.__file__).parent


@dataclass
class OrdersMetadata(KVConnectorMetadata):
    """A step's orders on their way to the workers."""

    orders: Orders


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """A step's reports on their way to the scheduler."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, ReportMetadata), "all ranks run the same connector"
        return ReportMetadata(self.report.merge(other.report))


@dataclass
class WeightsHandshake(KVConnectorHandshakeMetadata):
    """Which weights a rank has, on its way to the scheduler before the first request."""

    weights: str


@dataclass
class SemBlendStats(KVConnectorStats):
    """What our metrics were told, as data that crosses processes."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return SemBlendStats(data=telemetry.merge(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return telemetry.summary(self.data)

    def is_empty(self) -> bool:
        return not self.data


class SemBlendPromMetrics(KVConnectorPromMetrics):
    """In the API server: counts into the registry that vLLM exposes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._metrics = make_metrics(True)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        del engine_idx
        telemetry.replay(transfer_stats_data, self._metrics)


class SemBlendConnectorV1(KVConnectorBase_V1, SupportsHMA):
    """Non-prefix KV reuse in stock vLLM; see `semblend.integration.vllm`.

    `SupportsHMA` leaves vLLM's hybrid KV manager on: a model that needs it, we decline, and it runs as without us.
    Where the user turns it off, a model with sliding windows keeps all KV in one list of blocks, and is served.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = connector_settings(self._kv_transfer_config.kv_connector_extra_config or {})
        self._scheduler: SchedulerConnector | None = None
        self._spare = RefusingConnector(int(vllm_config.cache_config.block_size or 1))  # answers where ours fails
        self._worker: WorkerConnector | RefusingConnector = self._spare
        self._unplaced: WorkerConnector | None = None  # while its donors have no memory of the device
        self._ranks, self._failures = RankWatch(), FailureLog()
        self._is_part = find_multi_connector() is not None  # of a MultiConnector, beside others
        self._untold: list[tuple[str, str, str]] = []  # failures that go to the scheduler with the next report
        self._tally: telemetry.MetricsTally | None = None
        self._admin: AdminSocket | None = None
        if role is KVConnectorRole.SCHEDULER:
            semblend, self._tally = make_semblend(self._settings)
            facts = engine_facts(vllm_config, kv_cache_config, vllm.__version__, PACKAGE)
            outcomes = None
            if facts.refusal is None:
                gate = choose_gate(self._settings, vllm_config)
                log.info("SemBlend's quality gate: %s", gate.describe())
                outcomes = OutcomeMemory(gate.thresholds)
            self._scheduler = SchedulerConnector(facts, self._settings, semblend, outcomes=outcomes)
            self._admin = open_admin(self._settings, self._scheduler)
            share_donors(self._settings, self._scheduler, vllm_config, kv_cache_config)
            if not self._is_part:  # else these settings are one part's, and vLLM reads the others
                self.adapt(self._kv_transfer_config)

    def adapt(self, transfer: Any) -> None:
        """Change the engine's settings of KV transfer, which vLLM reads after it has made its connector.

        A load of ours that is refused is known before its request is scheduled, so that computing its blocks is right
        with every scheduler and model runner; failing the request would not be. Where we serve nothing, nothing is ever
        loaded, and vLLM need not wait with blocks that it frees, as it does for a connector that may write them.
        """
        if self._ours.facts.refusal is not None:
            transfer.kv_role = "kv_producer"
        elif transfer.kv_load_failure_policy != "recompute":
            log.info(
                "SemBlend sets kv_load_failure_policy from %s to recompute: a load of ours that is refused is computed "
                "by vLLM, and its request goes on",
                transfer.kv_load_failure_policy,
            )
            transfer.kv_load_failure_policy = "recompute"

    @property
    def serves(self) -> bool:
        """Whether anything is reused in this engine; in the scheduler's process."""
        return self._ours.facts.refusal is None

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a donor that was not captured is a donor less, no more

    # -- scheduler -------------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """From 0.30 on; calls `bind_gpu_block_pool`."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._ours.facts.refusal:
            return
        managers = kv_cache_manager.coordinator.single_type_managers
        self._ours.locks.cached_counts = [manager.num_cached_block for manager in managers]

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        self._ours.locks.block_pool = gpu_block_pool
        if self._settings.reset_drops_donors:
            self._ours.donors.resets = ResetWatch(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._safely("arrival", lambda: self._ours.note_arrival(request), None)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        ours, name = self._ours, request.request_id
        nothing: int | None = 0
        tokens = self._safely("lookup", lambda: ours.count_matched(request, num_computed_tokens), nothing, name)
        return tokens, bool(tokens)

    def leave_to_another(self, request: Any, exact_tokens: int, local_tokens: int) -> None:
        """Another connector brings the prompt from ``local_tokens`` to ``exact_tokens``; for `multi_connector`."""
        ours, name = self._ours, request.request_id
        self._safely("lookup", lambda: ours.leave_to_another(request, exact_tokens, local_tokens), None, name)

    def stand_beside_others(self) -> None:
        """Beside others no donor is published before its step is reported: a load of theirs may have failed in it."""
        self._ours.donors.stands_beside_others = True

    def note_failed_loads(self, block_ids: set[int]) -> None:
        """Loads of others, or of ours, have left these blocks invalid; for `multi_connector`."""
        self._safely("failed loads", lambda: self._ours.note_failed_loads(block_ids), None)

    def holds_approximate(self, request_id: str) -> bool:
        """Whether a request's blocks may hold approximate KV; for `multi_connector`."""
        return self._ours.holds_approximate(request_id)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ours, name = self._ours, request.request_id
        if ours.facts.refusal:  # a hybrid model has several kinds of blocks, one without attention has none
            return
        block_ids = list(blocks.get_block_ids()[0])
        try:
            ours.note_allocated(request, block_ids, num_external_tokens)
        except Exception as error:
            log.warning("SemBlend: a claim failed for %s", name, exc_info=True)
            ours.report_failure("claim", f"{type(error).__name__}: {error}", name)
            ours.refuse_claim(request, block_ids, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        ours, everything = self._ours, (0, num_external_tokens)
        told = self._safely(
            "sources", lambda: ours.count_hit_sources(request.request_id, num_external_tokens), everything
        )
        reused, computed = told
        sources = {CacheHitSource.HOST: reused, CacheHitSource.EXTERNAL_UNSPECIFIED: computed}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        ours = self._ours
        if ours.facts.refusal:
            return OrdersMetadata(Orders())
        try:
            return OrdersMetadata(ours.build_orders(scheduler_output))
        except Exception as error:
            log.warning("SemBlend: a step failed", exc_info=True)
            ours.report_failure("orders", f"{type(error).__name__}: {error}")
            return OrdersMetadata(ours.build_least_orders(scheduler_output.preempted_req_ids or ()))

    def update_connector_output(self, connector_output: Any) -> None:
        found = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(found, ReportMetadata):
            ours, report = self._ours, found.report
            self._safely("report", lambda: ours.note_report(report), None, *report.served)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Once, when the engine is made. Of connectors beside us it may be theirs."""
        digests = [one.weights for one in metadata.values() if isinstance(one, WeightsHandshake)]
        if digests:
            ours, report = self._ours, Report(weights=join_digests(digests))
            self._safely("weights", lambda: ours.note_report(report), None)
            self._safely("directory", ours.donors.take_in_all, None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        ours, name = self._ours, request.request_id
        try:
            receipt = ours.finish(name, block_ids) if ours.facts.refusal is None else ours.finish_refused(request)
        except Exception as error:
            log.warning("SemBlend: a receipt failed for %s", name, exc_info=True)
            ours.report_failure("receipt", f"{type(error).__name__}: {error}", name)
            ours.let_go(name)
            receipt = None
        if receipt is None or not self._settings.receipts:
            return False, None
        return False, {"semblend": receipt.to_caller_dict()}

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """In place of `request_finished` where vLLM's hybrid KV manager is on, whatever the model."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def reset_cache(self) -> bool | None:
        return self._safely("reset", lambda: self._ours.reset(), False)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        data = self._tally.take() if self._tally is not None else {}
        return SemBlendStats(data=data) if data and VLLM.find(vllm.__version__).is_known else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return SemBlendStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any, **named: Any) -> KVConnectorPromMetrics | None:
        return SemBlendPromMetrics(*args, *named.values()) if VLLM.find(vllm.__version__).is_known else None

    # -- worker ----------------------------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The first thing that every version and both model runners call in a step, before they compute anything.

        Loads are worked on here. vLLM has a hook for them, but calls it behind the forward pass from some version on:
        there a pass of ours could overwrite what sampling is about to read.
        """
        super().bind_connector_metadata(connector_metadata)
        self._place_donors()
        with self._guard("before_step"), self._ranks.work():
            self._worker.before_step(self._orders)
        with self._guard("load"), self._ranks.work():
            self._worker.load(self._orders)
        with self._guard("load"):
            self._spare.load(self._orders)  # what is left of them: every load gets a verdict

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Make the worker ours, on all ranks or on none. Without one nothing is captured and nothing ever claimed."""
        config, caches = self._vllm_config, self._kv_cache_config
        with self._guard("register"):
            if refusal(config, caches, vllm.__version__, PACKAGE) is not None:
                return  # the scheduler's side has said so
        made: WorkerConnector | None = None
        try:
            model = StockModel(find_runner_of_caller(), config, caches, kv_caches, self._quiet)
            model.check()
            made = make_worker_connector(model, self._settings, config)
        except Exception as error:
            log.warning(
                "SemBlend reuses nothing in this engine: %s", error, exc_info=not isinstance(error, SemBlendError)
            )
        with self._guard("register"):
            failed, others = meet_ranks(made is None, config)
            self._ranks = RankWatch(others)
            if failed or made is None:
                return
            self._worker = self._unplaced = made
            with self._ranks.work():
                made.warm_up()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The weights by name, so that the first request finds donors that neighbours have published.

        vLLM asks when it has warmed up: what is free on the device now is free in service.
        """
        self._place_donors()
        weights = ""
        with self._guard("handshake"):  # the first step looks again, and tells
            weights = self._worker.tell_weights() if self._settings.donor_directory else ""
        return WeightsHandshake(weights) if weights else None

    def _place_donors(self) -> None:
        """Once, after vLLM has warmed up: it asks for the handshake then; of a part beside others it may not ask."""
        worker, self._unplaced = self._unplaced, None
        if worker is not None:
            with self._guard("place donors"):
                place_donors(worker, self._settings, self._vllm_config, self._kv_cache_config)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Done when the step's orders came: see `bind_connector_metadata`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No request is scheduled before its load is complete."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        del finished_req_ids
        finished = self._spare.take_finished()
        with self._guard("get_finished"):
            finished |= self._worker.take_finished()
        return None, finished or None

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Donors are captured whole, after the forward pass."""

    def wait_for_save(self) -> None:
        with self._guard("capture"), self._ranks.work():
            self._worker.capture(self._orders)
        with self._guard("capture"):
            self._spare.capture(self._orders)  # what is left of them is told as not captured
        if self._is_part:  # another connector may write blocks that are given away, on a stream of its own
            with self._guard("capture"), self._ranks.work():
                self._worker.copy_out()

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid = self._spare.take_invalid_blocks()
        with self._guard("load_errors"):
            invalid |= self._worker.take_invalid_blocks()
        return invalid

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = Report()
        with self._guard("report"):
            report = self._worker.take_report() or report
        if self._worker is not self._spare and (more := self._spare.take_report()) is not None:
            report.loaded |= more.loaded
            report.not_captured |= more.not_captured
            report.served += more.served
        if self.has_connector_metadata():  # a runner that speculates asks for the report before it lets us capture
            report.served += self._orders.served
            self._orders.served = []
        report.errors += self._untold
        self._untold = []
        return ReportMetadata(report) if report else None

    def shutdown(self) -> None:
        with self._guard("shutdown"):
            self._worker.close()
        if self._admin is not None:
            with self._guard("shutdown"):
                self._admin.close()
        if self._scheduler is not None:
            with self._guard("shutdown"):
                self._scheduler.donors.close()
            with self._guard("shutdown"):
                self._scheduler.semblend.close()

    # -- parts -----------------------------------------------------------------------------------------------------

    @property
    def _ours(self) -> SchedulerConnector:
        assert self._scheduler is not None, "vLLM calls scheduler hooks on the scheduler's object only"
        return self._scheduler

    @property
    def _orders(self) -> Orders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, OrdersMetadata), "made by build_connector_meta"
        return metadata.orders

    @contextmanager
    def _guard(self, where: str) -> Iterator[None]:
        """The border to vLLM's worker: a failure of ours costs reuse, never a step; a failed rank ends the engine."""
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            self._untold.append((where, self._failures.note(where, error), ""))

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """While our own passes run, vLLM must not call back for their layers."""
        if not self.has_connector_metadata():  # outside a step it does not
            yield
            return
        kept = self._get_connector_metadata()
        self.clear_connector_metadata()
        try:
            yield
        finally:
            super().bind_connector_metadata(kept)  # not ours: no step begins here

    def _safely(self, where: str, work: Callable[[], Answer], instead: Answer, *requests: str) -> Answer:
        """The border to vLLM's scheduler: a failure of ours costs reuse, never the ``requests`` that it concerns."""
        try:
            return work()
        except Exception as error:
            log.warning("SemBlend: %s failed for %s", where, ", ".join(requests) or "a step", exc_info=True)
            self._ours.report_failure(where, f"{type(error).__name__}: {error}", requests[0] if requests else "")
            for request_id in requests:
                self._ours.give_up(request_id)
            return instead


register()  # where our entry point did not run: vLLM finds the statistics of a MultiConnector's parts by their names
