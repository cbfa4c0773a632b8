"""What a request of SGLang asks of us, and whether it is of a kind that we can serve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from semblend.confirm.receipt import Receipt
from semblend.prompt import Namespace, Prompt, name_tenant
from semblend.quality import read_request_options
from semblend.session.session import SessionRequest


def read_request(
    req: Any, longest_prefix: int, engine: Namespace, *, require_cache_salt: bool = False
) -> SessionRequest:
    """A request of SGLang as a session sees it; ``longest_prefix`` is what SGLang lets a prefix cover.

    A caller's word stands in ``custom_params={"semblend": {"opt_out": true, "quality": "fast"}}`` of its sampling
    parameters.
    """
    salt = join_salts(req)
    said = (getattr(req.sampling_params, "custom_params", None) or {}).get("semblend")
    asked = read_request_options(said)
    return SessionRequest(
        request_id=req.rid,
        prompt=Prompt(np.array(req.origin_input_ids, dtype=np.int64), namespace=build_namespace(salt, engine)),
        longest_prefix=longest_prefix,
        unsupported=explain_decline(req, require_salt=require_cache_salt and not salt) or "",
        quality=asked.quality,
        opt_out=asked.opt_out,
        answered=len(req.output_ids) > 0,
        base=asked.base,
        source=req,
    )


def show_receipt(req: Any, receipt: Receipt | None) -> None:
    """Have SGLang put the receipt, as a caller may see it, into ``meta_info["semblend"]`` of the answer.

    SGLang takes a list with one entry for each token of the answer; ours comes with the first.
    """
    if receipt is not None:
        req.customized_info = {**(req.customized_info or {}), "semblend": [receipt.to_caller_dict()]}


def build_namespace(salt: str, engine: Namespace) -> Namespace:
    """The engine's, with the salt of the request and the tenant that the salt stands for."""
    return replace(engine, salt=salt, tenant=name_tenant(salt))


def explain_decline(req: Any, *, require_salt: bool = False) -> str | None:
    """Why this request is computed without us, in one line; None for plain text generation."""
    if require_salt:
        return "this server reuses for requests with a cache_salt only (require_cache_salt), and it has none"
    for names, why in _DECLINES:
        if any(_is_set(getattr(req, name, None)) for name in names):
            return why
    if getattr(req, "return_logprob", False) and getattr(req, "logprob_start_len", -1) not in (-1, None):
        return "the request wants log probabilities of its prompt, so every token is computed"
    if len(req.output_ids):
        return "the request was retracted and goes on with the tokens it has said"
    return None


_DECLINES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("multimodal_inputs",), "multimodal tokens stand for inputs that token ids do not show"),
    (("input_embeds", "positional_embed_overrides"), "embeddings have no tokens to compare"),
    (("lora_id",), "a LoRA adapter is bound to the rows of SGLang's own batch"),
    (("session", "session_id"), "a session keeps KV of its own"),
    (("beam_group",), "beam search forks the rows of a request"),
    (("skip_radix_cache_insert",), "SGLang wants nothing of it in the cache"),
    (("bootstrap_room",), "its KV goes to or comes from another engine, which would take approximate KV as exact"),
    (("token_indices_to_pool", "return_pooled_hidden_states"), "a pooling request has no next token to check"),
    (("return_hidden_states", "return_routed_experts"), "the request wants to see every token computed"),
)


def _is_set(value: Any) -> bool:
    return value is not None and value is not False and value != ""


def join_salts(req: Any) -> str:
    """``extra_key`` and ``cache_salt`` as one text from which both can be told; empty where neither is set."""
    parts = [str(getattr(req, name, None) or "") for name in ("extra_key", "cache_salt")]
    return f"{len(parts[0])}:{parts[0]}{parts[1]}" if any(parts) else ""
