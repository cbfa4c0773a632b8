"""What a request asks of us, and whether it is of a kind that we can serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from semblend.config import QUALITY_MODES
from semblend.prompt import Namespace


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """``kv_transfer_params={"semblend": {"opt_out": true, "quality": "fast"}}`` of a request."""

    opt_out: bool = False
    quality: str | None = None


def read_options(request: Any) -> RequestOptions:
    """What the request says about itself; anything unknown in there is ignored, it must not fail an answer."""
    given = (getattr(request, "kv_transfer_params", None) or {}).get("semblend")
    if not isinstance(given, dict):
        return RequestOptions()
    quality = given.get("quality")
    return RequestOptions(given.get("opt_out") is True, quality if quality in QUALITY_MODES else None)


def explain_decline(request: Any) -> str | None:
    """Why this request is computed without us, in one line; None for plain text generation."""
    if getattr(request, "pooling_params", None) is not None:
        return "a pooling request has no next token to check"
    if getattr(request, "prompt_embeds", None) is not None:
        return "prompt embeddings have no tokens to compare"
    if getattr(request, "mm_features", None):
        return "multimodal tokens stand for inputs that token ids do not show"
    if getattr(request, "lora_request", None) is not None:
        return "a LoRA adapter is bound to the rows of vLLM's own batch"
    if getattr(request, "skip_reading_prefix_cache", False):
        return "the request wants every token computed (prompt logprobs)"
    if getattr(request, "resumable", False):
        return "a streaming-input session grows while it runs"
    return _explain_transfer_decline(getattr(request, "kv_transfer_params", None) or {})


def _explain_transfer_decline(params: Mapping[str, Any]) -> str | None:
    """Why a request that is split between a prefill and a decode engine is computed without us; None for others.

    The decode engine caches the KV that it gets as exact, whatever it is, so the prefill engine must not reuse
    approximately. What a decode engine gets comes from an engine that we know nothing about, so it is no donor.
    """
    if params.get("do_remote_decode"):
        return "its KV goes to a decode engine, which would take approximate KV as exact (do_remote_decode)"
    if params.get("do_remote_prefill"):
        return "its KV comes from a prefill engine (do_remote_prefill)"
    return None


def build_namespace(request: Any, engine: Namespace) -> Namespace:
    """The engine's, with what the request adds: its salt and its adapter."""
    lora = getattr(request, "lora_request", None)
    adapter = f"{lora.lora_name}:{lora.lora_int_id}:{lora.lora_path}" if lora else ""
    return replace(engine, salt=request.cache_salt or "", adapter=adapter)
