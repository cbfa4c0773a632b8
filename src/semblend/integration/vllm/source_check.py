"""What we lean on in vLLM, as a table, and a check of it against the sources of a version, without importing them.

It finds a name that is gone or an argument that was renamed, for every version that can be downloaded. It cannot find a
changed meaning: only a run does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Need:
    """``name`` (``Class`` or ``Class.method`` or ``function``) in a file, with these arguments or fields.

    ``optional``: without it we work all the same, and lose what ``use`` says.
    """

    file: str
    name: str
    members: tuple[str, ...] = ()
    use: str = ""
    optional: bool = False


BESIDE_OFFLOADING = "beside OffloadingConnector"
_BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
_MULTI = "distributed/kv_transfer/kv_connector/v1/multi_connector.py"
CONTRACT: tuple[Need, ...] = (
    Need(
        "distributed/kv_transfer/kv_connector/factory.py",
        "KVConnectorFactory.register_connector",
        ("name", "module_path", "class_name"),
        "our name without a module path",
        optional=True,
    ),
    Need(_BASE, "KVConnectorBase_V1.__init__", ("vllm_config", "role", "kv_cache_config"), "to be made"),
    Need(_BASE, "KVConnectorBase_V1.get_num_new_matched_tokens", ("request", "num_computed_tokens"), "to claim"),
    Need(_BASE, "KVConnectorBase_V1.update_state_after_alloc", ("request", "blocks", "num_external_tokens"), "blocks"),
    Need(_BASE, "KVConnectorBase_V1.build_connector_meta", ("scheduler_output",), "orders"),
    Need(_BASE, "KVConnectorBase_V1.build_connector_worker_meta", (), "reports"),
    Need(_BASE, "KVConnectorBase_V1.update_connector_output", ("connector_output",), "reports"),
    Need(_BASE, "KVConnectorBase_V1.get_finished", ("finished_req_ids",), "the end of a load"),
    Need(_BASE, "KVConnectorBase_V1.get_block_ids_with_load_errors", (), "refused loads"),
    Need(_BASE, "KVConnectorBase_V1.request_finished", ("request", "block_ids"), "receipts"),
    Need(_BASE, "SupportsHMA.request_finished_all_groups", ("request", "block_ids"), "hybrid models as without us"),
    Need(_BASE, "KVConnectorWorkerMetadata.aggregate", ("other",), "reports"),
    Need(_BASE, "KVConnectorBase_V1.bind_gpu_block_pool", ("gpu_block_pool",), "the second lock"),
    Need(
        _BASE,
        "KVConnectorBase_V1.bind_kv_cache_manager",
        ("kv_cache_manager",),
        "the answer's blocks in KV events",
        optional=True,
    ),
    Need(_BASE, "KVConnectorBase_V1.get_external_cache_hit_sources", (), "vLLM's split by source", optional=True),
    Need(_BASE, "KVConnectorBase_V1.reset_cache", (), "reset"),
    Need("v1/metrics/cache_hit_source.py", "CacheHitSource", (), "vLLM's split by source", optional=True),
    Need("distributed/kv_transfer/kv_connector/v1/metrics.py", "KVConnectorPromMetrics.observe", (), "metrics"),
    Need(
        "v1/outputs.py",
        "KVConnectorOutput",
        ("kv_connector_worker_meta", "invalid_block_ids", "finished_recving"),
        "reports",
    ),
    Need("config/kv_transfer.py", "KVTransferConfig", ("kv_load_failure_policy",), "refused loads"),
    Need("v1/core/kv_cache_manager.py", "KVCacheManager.allocate_slots", ("delay_cache_blocks",), "the first lock"),
    Need("v1/core/sched/scheduler.py", "Scheduler._update_waiting_for_remote_kv", ("request",), "asynchronous loads"),
    Need(
        "forward_context.py",
        "set_forward_context",
        ("attn_metadata", "vllm_config", "num_tokens", "slot_mapping", "skip_compiled"),
        "passes of our own",
    ),
    Need(
        "v1/attention/backend.py",
        "CommonAttentionMetadata",
        tuple(
            "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len max_seq_len "  # noqa: SIM905
            "block_table_tensor slot_mapping causal positions seq_lens_cpu_upper_bound".split()
        ),
        "passes of our own",
    ),
    Need(
        "v1/attention/backend.py",
        "AttentionMetadataBuilder.build",
        ("common_prefix_len", "common_attn_metadata", "fast_build"),
        "passes of our own",
    ),
    Need(
        "vllm_flash_attn/flash_attn_interface.py",
        "flash_attn_varlen_func",
        tuple(
            "q k v max_seqlen_q cu_seqlens_q max_seqlen_k seqused_k softmax_scale causal block_table "  # noqa: SIM905
            "return_softmax_lse fa_version".split()
        ),
        "many scattered rows on a GPU",
        optional=True,
    ),
    Need("v1/request.py", "Request.update_block_hashes", (), "the first lock"),
    Need("v1/core/block_pool.py", "BlockPool.evict_blocks", ("block_ids",), "the second lock"),
    Need("v1/core/block_pool.py", "BlockPool.reset_prefix_cache", (), "a reset drops donors"),
    Need("v1/core/sched/output.py", "CachedRequestData", ("resumed_req_ids", "new_block_ids"), "block tables"),
    Need("v1/core/sched/output.py", "SchedulerOutput", ("preempted_req_ids",), "preemption"),
    Need(_MULTI, "MultiKVConnectorMetadata", ("metadata", "extra_async_saves"), "beside others", optional=True),
    Need(
        _MULTI,
        "MultiConnector.update_state_after_alloc",
        ("request", "blocks", "num_external_tokens"),
        "beside others",
        optional=True,
    ),
    Need(
        "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py",
        "OffloadingConnectorScheduler.__init__",
        ("_current_batch_allocated_block_ids",),
        BESIDE_OFFLOADING,
        optional=True,
    ),
)


@cache
def missing(package: Path, *, optional: bool = False) -> tuple[str, ...]:
    """One line for every need that the sources below ``package`` do not meet; ``optional``: those we can do without."""
    return tuple(line for need in CONTRACT if need.optional == optional and (line := _missing(package, need)))


def missing_for_offloading(package: Path) -> str | None:
    """What `multi_connector` needs of OffloadingConnector, where these sources lack it."""
    return next((line for line in missing(package, optional=True) if BESIDE_OFFLOADING in line), None)


def _missing(package: Path, need: Need) -> str | None:
    path = package / need.file
    if not path.exists():
        return f"{need.file} is not there ({need.use})"
    found = _find(ast.parse(path.read_text(encoding="utf-8")), need.name.split("."))
    if found is None:
        return f"{need.name} is not in {need.file} ({need.use})"
    lacking = [name for name in need.members if name not in set(_members(found))]
    return f"{need.name} in {need.file} lacks {', '.join(lacking)} ({need.use})" if lacking else None


def _find(tree: ast.AST, names: list[str]) -> ast.AST | None:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == names[0]:
            return node if len(names) == 1 else _find(node, names[1:])
    return None


def _members(node: ast.AST) -> Iterator[str]:
    """Arguments of a function, annotated fields of a class or of an object that is being made."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield from (argument.arg for argument in (*node.args.args, *node.args.kwonlyargs))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, (ast.Name, ast.Attribute)):
            yield child.target.id if isinstance(child.target, ast.Name) else child.target.attr
