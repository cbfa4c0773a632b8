"""Start-up: what the engine is, whether we can work in it, and what the connector is made of in each process."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from semblend.config import GIB
from semblend.confirm.log_lines import LogSink
from semblend.errors import SemBlendError, StoreError
from semblend.facade import SemBlend
from semblend.integration.versions import VLLM, VersionEvidence
from semblend.integration.vllm.metrics import MetricsTally
from semblend.integration.vllm.refusals import refusal
from semblend.integration.vllm.scheduler.admin import AdminSocket, DonorAdmin
from semblend.integration.vllm.scheduler.records import EngineFacts
from semblend.integration.vllm.scheduler.scheduler_connector import SchedulerConnector
from semblend.integration.vllm.settings import ConnectorSettings
from semblend.integration.vllm.worker.model_access import StockModel, read_rope_config
from semblend.integration.vllm.worker.quantised import NARROW_LOSS, NARROW_TYPES
from semblend.integration.vllm.worker.worker_connector import WorkerConnector
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.donors.directory import SharedDonors
from semblend.materialize.donors.directory_kv import DirectoryKv, KvSignature
from semblend.materialize.donors.places import (
    AUTO,
    choose_device_bytes,
    choose_host_bytes,
    describe_places,
    read_memory,
)
from semblend.materialize.donors.store import PrivateFolder
from semblend.materialize.gate.observers import find_tolerance
from semblend.materialize.gate.thresholds import ChosenTable, choose_table
from semblend.materialize.kv.moves import count_bytes, packed_shapes
from semblend.materialize.weights_watch import WeightsWatch
from semblend.prompt import Namespace

log = logging.getLogger("vllm.semblend")


def engine_facts(vllm_config: Any, kv_cache_config: Any, version: str, package: Path) -> EngineFacts:
    """What does not change while this engine runs; its ``refusal`` is logged once, here."""
    row = VLLM.find(version)
    why = refusal(vllm_config, kv_cache_config, version, package)
    if row.evidence is VersionEvidence.STATIC:
        log.warning("SemBlend with vLLM %s: %s", version, row.note)
    if why:
        log.warning(
            "SemBlend reuses nothing in this engine: %s (what a connector that reuses nothing still changes: "
            "docs/guides/vllm.md#engines-that-are-declined)",
            why,
        )
    if not row.is_known:  # nothing of its configuration is looked at: names may have changed
        return EngineFacts(version, Namespace(), 1, 1, why)
    model, cache = vllm_config.model_config, vllm_config.cache_config
    namespace = Namespace(
        model=str(model.model),
        revision=str(model.revision or ""),
        tokenizer=str(model.tokenizer or ""),
        kv_dtype=f"{model.dtype}/{cache.cache_dtype}",
        rope=str(read_rope_config(vllm_config).get("rope_parameters") or ""),
    )
    hashed = getattr(cache, "hash_block_size", None) or cache.block_size
    return EngineFacts(version, namespace, int(cache.block_size), int(hashed), why)


def make_semblend(settings: ConnectorSettings) -> tuple[SemBlend, MetricsTally]:
    """The library, telling vLLM's log and, by way of vLLM, its metrics endpoint."""
    tally = MetricsTally()
    semblend = SemBlend(settings.config, sinks=[LogSink(log, "vllm")], metrics=tally)
    semblend.warm_up()
    return semblend, tally


def choose_gate(settings: ConnectorSettings, vllm_config: Any) -> ChosenTable:
    """The table of thresholds for this engine's model; it was measured over a cache of 16 bits or more."""
    chosen = choose_table(str(vllm_config.model_config.model), file=settings.thresholds)
    if str(vllm_config.cache_config.cache_dtype) not in NARROW_TYPES:
        return chosen
    return replace(chosen, thresholds=chosen.thresholds.tighten(NARROW_LOSS))


def quality_settings(settings: ConnectorSettings, vllm_config: Any) -> QualitySettings:
    """The gate's settings; a pass of ours is never larger than what vLLM has measured memory for."""
    return QualitySettings.of_config(
        settings.config,
        choose_gate(settings, vllm_config).thresholds,
        latency_budget_ms=settings.latency_budget_ms,
        chunk_tokens=int(vllm_config.scheduler_config.max_num_batched_tokens),
        piece_ms=settings.step_work_ms,
        prefills=False,  # vLLM does that itself, in chunks between its other work
    )


def make_worker_connector(model: StockModel, settings: ConnectorSettings, vllm_config: Any) -> WorkerConnector:
    """The worker's side for a model that runs in this engine."""
    quality = quality_settings(settings, vllm_config)
    if settings.donor_bits == 8:
        quality = replace(quality, canary_tolerance=find_tolerance(model.dtype, 8, narrow=model.narrow))
    return WorkerConnector(
        model,
        model.block_tokens,
        quality,
        host_bytes=_choose_host_bytes(settings, model),
        device_bytes=max(0, settings.donor_device_bytes),
        disk_path=settings.donor_disk_path,
        disk_bytes=settings.donor_disk_bytes,
        donor_bits=settings.donor_bits,
        directory=_open_directory(model, settings),
        eviction=settings.config.eviction,
        warm_up_model=model.warm_up,
        watch_weights=lambda: WeightsWatch(model.module),
    )


def _choose_host_bytes(settings: ConnectorSettings, model: StockModel) -> int:
    if settings.donor_host_bytes != AUTO:
        return settings.donor_host_bytes
    return choose_host_bytes(read_memory()[1], model.capabilities.ranks)


def place_donors(worker: WorkerConnector, settings: ConnectorSettings, vllm_config: Any, kv_cache_config: Any) -> None:
    """Give donors the device memory that vLLM leaves over, once it has warmed up; say how many fit where.

    None where vLLM gives all memory back to sleep. Where it was given the bytes of its cache, it has no share of the
    device beyond them.
    """
    device, cache = worker.device, vllm_config.cache_config
    sleeps = bool(getattr(vllm_config.model_config, "enable_sleep_mode", False))
    if settings.donor_device_bytes == AUTO and device.type == "cuda" and not sleeps:
        free, total = torch.cuda.mem_get_info(device)
        share = 0.0 if getattr(cache, "kv_cache_memory_bytes", None) else float(cache.gpu_memory_utilization)
        worker.donor_kv.give_device(device, choose_device_bytes(free, total, share))
    budgets, (token, share) = worker.donor_kv.budgets, _count_token_bytes(settings, vllm_config, kv_cache_config)
    places = describe_places(budgets["device"], budgets["host"], token, token * share)
    disk = f", {budgets['disk'] / GIB:.1f} GiB on the disk" if budgets["disk"] else ""
    own = (
        f"; {worker.own_bytes / GIB:.1f} GiB of the device for buffers and recorded passes" if worker.own_bytes else ""
    )
    log.info("SemBlend: donors: %s%s%s", places, disk, own)


def open_admin(settings: ConnectorSettings, ours: SchedulerConnector) -> AdminSocket | None:
    """The operator's socket, where one is asked for; an engine runs without it if it cannot be had."""
    if not settings.admin_socket or ours.facts.refusal:
        return None
    admin = DonorAdmin(ours.semblend, ours.donors.act, find_heir=ours.donors.find_heir)
    try:
        door = AdminSocket(settings.admin_socket, admin.answer)
    except SemBlendError as error:
        log.warning("SemBlend: %s (%s)", error.message, error.hint)
        return None
    ours.donors.admin = admin
    log.info("SemBlend: an operator reaches the donors at %s", door.path)
    return door


def _open_directory(model: StockModel, settings: ConnectorSettings) -> DirectoryKv | None:
    """The donor directory as this rank sees it; an engine runs without it if it cannot be had."""
    if not settings.donor_directory:
        return None
    layers, kv_heads, head_dim, dtype = model.kv_shape
    signature = KvSignature(
        weights=WeightsWatch(model.module).digest,
        dtype=str(dtype).removeprefix("torch."),
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        bits=settings.donor_bits,
        rope=model.rope,
        rank=model.rank,
        ranks=model.capabilities.ranks,
    )
    try:
        return DirectoryKv(PrivateFolder(settings.donor_directory), signature)
    except StoreError:  # the scheduler's side has said so
        return None


def share_donors(settings: ConnectorSettings, ours: SchedulerConnector, vllm_config: Any, kv_cache_config: Any) -> None:
    """Let the scheduler's side publish its donors and find those of its neighbours, where a directory is set."""
    if not settings.donor_directory or ours.facts.refusal:
        return
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    token, share = _count_token_bytes(settings, vllm_config, kv_cache_config)
    try:
        ours.donors.shared = SharedDonors(
            settings.donor_directory,
            settings.donor_directory_bytes,
            ours.facts.namespace,
            token_bytes=token * ranks * share,
            ranks=ranks,
            ttl_s=settings.config.donor_ttl_s,
        )
        log.info("SemBlend shares donors with its neighbours in %s", settings.donor_directory)
    except StoreError as error:
        log.warning("SemBlend: %s (%s)", error.message, error.hint)


def _count_token_bytes(settings: ConnectorSettings, vllm_config: Any, kv_cache_config: Any) -> tuple[float, float]:
    """Bytes that a donor takes for a token on one rank, in the type that it is read in, and the share of them that it
    takes beside the device."""
    group = kv_cache_config.kv_cache_groups[0]
    layers = group.layer_names[: vllm_config.model_config.get_num_layers(vllm_config.parallel_config)]  # no draft's
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)  # where a draft's are of another size
    spec = max((specs[name] for name in layers), key=lambda one: one.page_size_bytes) if specs else group.kv_cache_spec
    held = int(spec.dtype.itemsize)
    width = int(vllm_config.model_config.dtype.itemsize) if held == 1 else held
    token = spec.page_size_bytes / spec.block_size * len(layers) * width / held
    if settings.donor_bits != 8:
        return token, 1.0
    tokens, head_dim = 6400, int(spec.head_size)
    return token, count_bytes(packed_shapes(1, tokens, 1, head_dim)) / (2 * tokens * head_dim * width)
