"""What a request of TensorRT-LLM asks of us, and whether it is of a kind that we can serve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from semblend.integration.desk.records import Waiting
from semblend.integration.trtllm.salts import read_salt
from semblend.prompt import Namespace, Prompt, name_tenant


def read_request(request: Any, engine: Namespace, *, require_cache_salt: bool = False) -> Waiting:
    """A request of TensorRT-LLM as the desk sees it. TensorRT-LLM computes the last token of a prompt itself."""
    tokens = np.array(request.get_tokens(0), dtype=np.int64)
    tenant = read_salt(find_salt(request)).tenant
    namespace = replace(engine, salt=tenant, tenant=name_tenant(tenant))
    return Waiting(
        request_id=str(request.request_id),
        prompt=Prompt(tokens, namespace=namespace),
        longest_prefix=len(tokens) - 1,
        declined=explain_decline(request, require_salt=require_cache_salt and not tenant) or "",
        source=request,
    )


def find_salt(request: Any) -> str | None:
    """The request's ``cache_salt``; None where it has none, or where this version shows a number in its place."""
    salt = getattr(request, "cache_salt", None)
    return salt if isinstance(salt, str) else None


def explain_decline(request: Any, *, require_salt: bool = False) -> str | None:
    """Why this request is computed without us, in one line; None for plain text generation."""
    if require_salt:
        return "this server reuses for requests with a cache_salt only (require_cache_salt), and it has none"
    if find_salt(request) is None and getattr(request, "cache_salt_id", None) is not None:
        return "its cache_salt is shown as a number, which names no tenant (cache_salt_id)"
    for name, why in (
        ("lora_task_id", "a LoRA adapter changes what its tokens compute"),
        ("multimodal_hashes", "multimodal tokens stand for inputs that token ids do not show"),
        ("prompt_embedding_table", "prompt embeddings have no tokens to compare"),
        ("return_context_logits", "it wants the logits of every token, so every token is computed"),
        ("is_generation_only_request", "its KV comes from another engine"),
        ("is_context_only_request", "its KV goes to another engine, which would take approximate KV as exact"),
    ):
        found = getattr(request, name, None)
        if (found() if callable(found) else found) not in (None, False, [], ()):
            return why
    return None
