"""Why an engine is not served, in one line for its log. Such an engine computes every request as without us.

Each line stands for something that our passes or our copies of KV would get wrong, not for something that nobody tried.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from semblend.integration.versions import VLLM
from semblend.integration.vllm.plugin import CONNECTOR
from semblend.integration.vllm.source_check import missing, missing_for_offloading
from semblend.integration.vllm.worker.latents import keeps_latents
from semblend.integration.vllm.worker.model_access import read_rope_config
from semblend.integration.vllm.worker.quantised import NARROW_TYPES
from semblend.materialize.kv.rope import LONGEST, attends_by_window, read_for_text
from semblend.materialize.kv.rope import refusal as rope_refusal

LOADS_AHEAD = frozenset(
    "OffloadingConnector SimpleCPUOffloadConnector LMCacheMPConnector HF3FSKVConnector MooncakeConnector "  # noqa: SIM905
    "NixlConnector NixlPullConnector NixlPushConnector".split()
)
"""Connectors of vLLM that load before a request is scheduled: what fails to load is computed, and nothing builds on it.
With a load in the request's own step and asynchronous scheduling vLLM answers with wrong tokens in that case."""
READ_TEXT_PLAINLY = frozenset(
    "Mistral3ForConditionalGeneration Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration "  # noqa: SIM905
    "Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Glm4vForConditionalGeneration "
    "Glm4vMoeForConditionalGeneration Gemma3ForConditionalGeneration KimiK25ForConditionalGeneration "
    "Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration".split()
)
"""Classes for images that were run with us (but for Gemma 4's unified one, which takes its text from the other), and of
which we know what a pass over text needs: token embeddings and positions, and that what images add to layers of
Qwen3-VL, and Gemma 4's embeddings of each layer, are set aside meanwhile. Which tokens of Gemma's images see each other
is said in the step's description for attention, and ours says nothing of it. Others may keep more in the
model while a step runs."""
DRAFTS = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator", "draft_model", "eagle", "eagle3", "mtp")
NEVER_RECURRENT = (
    "some layers keep a recurrent state (Mamba, linear attention) in place of KV: it sums up all tokens in front of it "
    "and cannot be moved to another place, so such models are never served; `semblend estimate`, `semblend arrange` "
    "and the router still help"
)
RECURRENT = (
    *("mamba_d_state", "mamba_n_heads", "ssm_state_size", "conv_L_cache", "linear_attn_config"),
    *("linear_num_key_heads", "hybrid_override_pattern"),
)
"""Fields of a config that only models with recurrent layers have."""
MIXES_WINDOWS = ("gemma2", "gemma3_text", "gpt_oss", "cohere2")
"""Model types with full layers beside windowed ones, also where a config does not list them."""
UNSAID: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {"head_dim": 256, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
}
"""What checkpoints of some types leave to their config class; of layers one period."""
WINDOWS_ONLY = "no layer has full attention: vLLM frees the KV behind the window, whatever its settings"
IN_CHUNKS = "some layers attend within chunks, which begin at other tokens where a passage has moved"
MOVABLE_TYPES = ("auto", "float32", "float16", "bfloat16", "half")
UNREADABLE_TYPES = {
    "e5m2": "keeps two bits of a number, too few for keys that are rounded again when they move",
    "per_token_head": "has a scale for each head of each token",
    "nvfp4": "packs two numbers in a byte, with a scale for every few of them",
    "quant": "rotates and packs what it stores",  # turboquant, ultraquant
    "ds_mla": "packs latents of 8 bits beside rotated numbers of 16",
    "int8": "holds whole numbers",
}
"""By a part of their names: what our passes would have to read and write in such a cache."""


def refusal(vllm_config: Any, kv_cache_config: Any, version: str, package: Path) -> str | None:
    """Why this engine cannot be served; None when it can."""
    row = VLLM.find(version)
    if not row.is_known:
        return row.note
    if lacking := missing(package):
        return f"this build of vLLM differs from {row.version}: {lacking[0]}"
    multi_connector = find_multi_connector()
    if multi_connector is not None and is_of_vllm(multi_connector):
        return (
            "in vLLM's MultiConnector the others would store approximate KV as exact; "
            'add "kv_connector_module_path":"semblend.integration.vllm.multi_connector" to it'
        )
    checks: tuple[Callable[[], str | None], ...] = (
        lambda: _refuse_role(vllm_config.kv_transfer_config),
        lambda: _refuse_neighbours(multi_connector, package),
        lambda: _refuse_ranks(vllm_config.parallel_config),
        lambda: _refuse_features(vllm_config),
        lambda: _refuse_model(vllm_config.model_config),
        lambda: _refuse_cache(vllm_config, kv_cache_config.kv_cache_groups),
        lambda: rope_refusal(
            read_rope_config(vllm_config),
            by_layer=True,
            latents=keeps_latents(kv_cache_config.kv_cache_groups[0].kv_cache_spec),
        ),
    )
    return next((why for check in checks if (why := check())), None)


def refuse_config(config: Mapping[str, Any]) -> str | None:
    """Why no engine of a model with this ``config.json`` is served, as far as a config says; None where it may be.

    >>> refuse_config({"model_type": "jamba", "mamba_d_state": 16}) == NEVER_RECURRENT
    True
    """
    said, architecture = config.get("text_config") or config, next(iter(config.get("architectures") or ()), "")
    text = {**UNSAID.get(str(said.get("model_type")), {}), **said}
    kinds = " ".join(map(str, text.get("layer_types") or ()))
    if any(text.get(name) for name in RECURRENT) or any(kind in kinds for kind in ("linear", "mamba", "conv")):
        return NEVER_RECURRENT
    if said is not config and architecture not in READ_TEXT_PLAINLY:
        return _explain_images(architecture)
    if why := _refuse_layers(text):
        return why
    if "chunked" in kinds or text.get("attention_chunk_size"):
        return IN_CHUNKS
    if attends_by_window(text) and "full_attention" not in kinds and text.get("model_type") not in MIXES_WINDOWS:
        return WINDOWS_ONLY
    read = {**read_for_text(text), LONGEST: text.get("max_position_embeddings")}  # vLLM's own limit, where none is set
    return rope_refusal(read, by_layer=True, latents=bool(text.get("kv_lora_rank")))


def find_multi_connector() -> Any:
    """The MultiConnector, vLLM's or our own kind, that calls its part; None without one. Nothing else tells a part."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if type(owner).__name__ == "MultiConnector" and type(owner).__module__.split(".")[0] in ("vllm", "semblend"):
            return owner
        frame = frame.f_back
    return None


def is_of_vllm(multi_connector: Any) -> bool:
    """Whether it is vLLM's own kind, which lets every part store every request."""
    return type(multi_connector).__module__.split(".")[0] == "vllm"


def _refuse_neighbours(multi_connector: Any, package: Path) -> str | None:
    """What other parts of a MultiConnector of ours make impossible."""
    if multi_connector is None:
        return None
    transfer = multi_connector._kv_transfer_config
    parts = list(_iterate_parts(transfer.kv_connector_extra_config))
    for name, role in [("MultiConnector", transfer.kv_role), *((_name(part), part.get("kv_role")) for part in parts)]:
        if role in ("kv_producer", "kv_consumer"):
            return (
                f"{name} has kv_role {role}: KV goes to or comes from other engines, and which requests' it is, "
                "nobody tells us; use kv_both"
            )
    if any(_name(part) == "OffloadingConnector" for part in parts) and (lacking := missing_for_offloading(package)):
        return f"OffloadingConnector of this vLLM cannot be told which blocks we write: {lacking}"
    if transfer.kv_load_failure_policy == "recompute":
        return None
    for part in parts:
        if part.get("kv_load_failure_policy") == "fail":
            return (
                f"{_name(part)} asks for kv_load_failure_policy fail, and under it each load of ours that is refused "
                "would fail its request"
            )
        if not _loads_ahead(part):
            return (
                f"{_name(part)} may load KV in the step that computes on it, so its kv_load_failure_policy is not ours "
                "to change, and under fail each load of ours that is refused would fail its request; add "
                '"kv_load_failure_policy":"recompute" to the MultiConnector if failed loads of both may be computed'
            )
    return None


def _iterate_parts(extra: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The settings of every part of a MultiConnector, those of a MultiConnector in it too."""
    for part in extra.get("connectors") or ():
        if _name(part) == "MultiConnector":
            yield from _iterate_parts(part.get("kv_connector_extra_config") or {})
        yield part


def _name(part: Mapping[str, Any]) -> str:
    return str(part.get("kv_connector"))


def _loads_ahead(part: Mapping[str, Any]) -> bool:
    if _name(part) in (CONNECTOR, "MultiConnector"):  # ourselves; and the parts of another one are asked themselves
        return True
    return _name(part) in LOADS_AHEAD and not part.get("kv_connector_module_path")  # else it is somebody's own


def _refuse_role(transfer: Any) -> str | None:
    role = getattr(transfer, "kv_role", "kv_both")
    if role == "kv_both":
        return None
    return (
        f"with kv_role {role} KV goes to or comes from other engines, which take approximate KV as exact; use kv_both"
    )


def _refuse_ranks(parallel: Any) -> str | None:
    if parallel.pipeline_parallel_size != 1:
        return "in a pipeline no rank has all layers, and a pass of ours needs them"
    if getattr(parallel, "data_parallel_size", 1) != 1:  # 1 in each engine of a dense model, whatever was asked for
        return "data parallel experts wait for every pass of all ranks, and ours is one rank's own"
    for kind in ("decode", "prefill"):
        if getattr(parallel, f"{kind}_context_parallel_size", 1) != 1:
            return f"context parallel engines keep a prompt's KV on several ranks ({kind}_context_parallel_size)"
    return None


def _refuse_features(vllm_config: Any) -> str | None:
    if vllm_config.lora_config is not None:
        return (
            "LoRA: vLLM tells its kernels once a step which adapter each row of its own batch has; "
            "a pass of ours between that and the step would run with the wrong adapters, and so would the step after it"
        )
    if vllm_config.speculative_config is not None and (why := _refuse_draft(vllm_config.speculative_config)):
        return why
    passes = getattr(getattr(vllm_config, "compilation_config", None), "pass_config", None)
    if getattr(passes, "fuse_attn_quant", False):
        return "attention writes a quantised output (fuse_attn_quant), which the attention of our passes does not"
    return None


def _refuse_draft(speculative: Any) -> str | None:
    """The served model checks every token of a draft. So a draft that lacks KV of a load guesses worse, no more; what
    counts is which blocks and hidden states its method reads and writes."""
    method = str(speculative.method)
    if getattr(speculative, "parallel_drafting", False):
        return (
            f"parallel drafting ({method}) fills slots of the prompt's blocks with guesses of its own layout, "
            "beside which loads and captures were never checked"
        )
    if method not in DRAFTS:
        return f"speculation by {method} may read hidden states or KV of the prompt that a load does not give it"
    if (chained := getattr(speculative, "use_multi_module_mtp", None)) is not None and chained():
        return "a chain of MTP modules computes a prompt's last tokens again, after we may have copied or shared them"
    return None


def _refuse_model(model: Any) -> str | None:
    if getattr(model, "is_multimodal_model", False) and model.architecture not in READ_TEXT_PLAINLY:
        return _explain_images(model.architecture)
    if getattr(model, "enable_sleep_mode", False) or getattr(model, "enable_cumem_allocator", False):
        return "sleep mode takes away what was allocated beside the KV cache, donors and recorded passes too"
    return _refuse_layers(vars(model.hf_text_config))


def _refuse_layers(text: Mapping[str, Any]) -> str | None:
    if text.get("index_topk"):
        return "sparse attention chooses tokens by an indexer's keys (index_topk), which lie beside the KV of donors"
    if text.get("num_kv_shared_layers"):
        return "layers share the KV of other layers, and a donor would hold it twice or not at all"
    return None


def _explain_images(architecture: str) -> str:
    return f"how {architecture}, a class for images or sound, computes text while they are there is not known"


def _refuse_cache(vllm_config: Any, groups: Any) -> str | None:
    cache = vllm_config.cache_config
    if getattr(cache, "kv_sharing_fast_prefill", False):
        return "layers share the KV of other layers (kv_sharing_fast_prefill): a prefill leaves them out"
    return _refuse_type(str(cache.cache_dtype), cache, groups) or _refuse_groups(vllm_config, groups)


def _refuse_type(name: str, cache: Any, groups: Sequence[Any]) -> str | None:
    """Of caches narrower than the model, those with one scale for a layer's keys and one for its values are served."""
    if name in MOVABLE_TYPES:
        return None
    if name not in NARROW_TYPES:
        what = next((why for part, why in UNREADABLE_TYPES.items() if part in name), "is none that our passes read")
        return f"a KV cache of type {name} {what}; fp8 (e4m3) with a scale for each layer is served"
    if any(keeps_latents(spec) for group in groups for spec in _list_specs(group)):
        return f"latents in 8 bits ({name}): our checks were not calibrated for what rounding does to them"
    if getattr(cache, "kv_cache_dtype_skip_layers", None):
        return "some layers keep KV in 8 bits and others in 16 (kv_cache_dtype_skip_layers)"
    if getattr(cache, "calculate_kv_scales", False):
        return "the first request sets the scales of the KV cache (calculate_kv_scales), after we have read them"
    return None


def _refuse_groups(vllm_config: Any, groups: Sequence[Any]) -> str | None:
    """One list of blocks has to hold the KV of every position in every layer. Through a window layers may attend."""
    drafts = vllm_config.speculative_config is not None
    specs = [spec for group in groups for spec in _list_specs(group)]
    kinds = {type(spec).__name__ for spec in specs}
    if any(kind.__name__ == "MambaSpec" for spec in specs for kind in type(spec).__mro__):
        return NEVER_RECURRENT
    if any(getattr(spec, "attention_chunk_size", None) for spec in specs):
        return IN_CHUNKS
    is_one_list = len(groups) == 1 and (drafts or _share_blocks(specs))  # a draft's layers may be of another size
    if is_one_list and kinds == {"FullAttentionSpec"}:
        return None
    if is_one_list and all(keeps_latents(spec) and not getattr(spec, "sliding_window", None) for spec in specs):
        return None
    if kinds == {"SlidingWindowSpec"}:
        return WINDOWS_ONLY
    if len(groups) > 1 and kinds == {"FullAttentionSpec", "SlidingWindowSpec"}:
        more, length = _compute_promotion(vllm_config, groups), vllm_config.model_config.max_model_len
        return (
            "layers without full attention keep no KV behind their window; with --disable-hybrid-kv-cache-manager vLLM "
            f"keeps it: a prompt of {length:,} tokens then holds {more:.1f} times the memory "
            "(docs/guides/vllm.md#models-with-sliding-windows)"
        )
    what = "the model and its draft do not" if drafts else "the model does not"
    return f"{what} have one kind of full attention in all layers"


def _share_blocks(specs: Sequence[Any]) -> bool:
    """Whether a block holds the same tokens in all layers. vLLM lists layers one by one where their heads differ, and
    0.26 on a GPU where only their windows do. Heads of unlike number or size are not read in 8 bits."""
    narrow = any(getattr(getattr(spec, "dtype", None), "itemsize", 2) == 1 for spec in specs)
    same = ("block_size", "dtype", *(("num_kv_heads", "head_size") if narrow else ()))
    return len({tuple(getattr(spec, name, None) for name in same) for spec in specs}) == 1


def _list_specs(group: Any) -> list[Any]:
    """What the layers of a group keep; one where all are alike."""
    return list((getattr(group.kv_cache_spec, "kv_cache_specs", None) or {"": group.kv_cache_spec}).values())


def _compute_promotion(vllm_config: Any, groups: Sequence[Any]) -> float:
    """How many times the KV the longest prompt holds, once it is computed, where no layer frees what is behind."""
    length, kept, whole = vllm_config.model_config.max_model_len, 0, 0
    for group in groups:
        spec, window = group.kv_cache_spec, getattr(group.kv_cache_spec, "sliding_window", None) or length
        block = len(group.layer_names) * spec.page_size_bytes
        kept += block * -(-min(length, window) // spec.block_size)
        whole += block * -(-length // spec.block_size)
    return whole / kept
