"""What a request asks of us, and whether it is of a kind that we can serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from semblend.confirm.receipt import Receipt, RequestFacts, build_receipt
from semblend.integration.vllm.scheduler.records import ENGINE, EngineFacts, Record
from semblend.integration.vllm.settings import ConnectorSettings
from semblend.plan.reuse_plan import Decline, DeclineReason
from semblend.prompt import Namespace, Prompt, name_tenant
from semblend.quality import RequestOptions, choose_quality, read_request_options
from semblend.session.session import SessionRequest

HINT_ACTION = "semblend.reuse"
"""The ``action_type`` of a KV hint that is for us; its payload says what ``kv_transfer_params.semblend`` would."""


def make_record(request: Any, facts: EngineFacts, settings: ConnectorSettings) -> Record:
    """The record of a request that vLLM asks about for the first time."""
    options, namespace = read_options(request), build_namespace(request, facts.namespace)
    asked = SessionRequest(
        request.request_id,
        Prompt(request.prompt_token_ids, namespace=namespace),
        quality=options.quality,
        declined=explain_decline(request, require_cache_salt=settings.require_cache_salt) or "",
        opt_out=options.opt_out,
        source=request,
    )
    return Record(asked, choose_mode(request, namespace, settings))


def choose_mode(request: Any, namespace: Namespace, settings: ConnectorSettings) -> str:
    """The mode of a request: its own word, its tenant's, or the engine's."""
    tenants = settings.config.find_tenant_quality(namespace.tenant)
    return choose_quality(read_options(request).quality, tenants, settings.config.quality)


def read_options(request: Any) -> RequestOptions:
    """What the request says about itself, and what an orchestrator says about it in ``kv_hints`` (from vLLM 0.32 on).

    The request says it in ``kv_transfer_params={"semblend": {"opt_out": true, "quality": 0.05}}``. Either of them may
    opt out. In the mode the request's own word counts, then the last hint.
    """
    own = read_request_options((getattr(request, "kv_transfer_params", None) or {}).get("semblend"))
    hints = [read_request_options(payload) for payload in _iterate_hints(getattr(request, "kv_hints", None))]
    quality = next((said.quality for said in (own, *reversed(hints)) if said.quality), None)
    return RequestOptions(own.opt_out or any(hint.opt_out for hint in hints), quality)


def _iterate_hints(envelope: Any) -> Iterator[Any]:
    """The payloads that are for us."""
    for action in getattr(envelope, "actions", None) or ():
        if getattr(action, "action_type", None) == HINT_ACTION:
            yield getattr(action, "payload", None)


def build_refused_receipt(request: Any, exact_tokens: int, engine: EngineFacts, settings: ConnectorSettings) -> Receipt:
    """The receipt of a request in an engine that we do not serve, without a look at its tokens."""
    namespace = build_namespace(request, engine.namespace)
    return build_receipt(
        RequestFacts(
            request_id=request.request_id,
            engine=ENGINE,
            engine_version=engine.version,
            namespace=namespace,
            mode=choose_mode(request, namespace, settings),
            prompt_tokens=len(request.prompt_token_ids),
            exact_tokens=exact_tokens,
            decision=Decline(DeclineReason.UNSUPPORTED_MODE, engine.refusal or ""),
        )
    )


def explain_decline(request: Any, *, require_cache_salt: bool = False) -> str | None:
    """Why this request is computed without us, in one line; None for plain text generation.

    ``require_cache_salt``: a request without a salt has no tenant, and shares nothing with anybody.
    """
    if require_cache_salt and not getattr(request, "cache_salt", None):
        return "this server reuses for requests with a cache_salt only (require_cache_salt), and it has none"
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
    if params.get("disagg_spec") is not None:
        return "its KV goes to a decode engine, which would take approximate KV as exact (LMCache's disagg_spec)"
    return None


def build_namespace(request: Any, engine: Namespace) -> Namespace:
    """The engine's, with what the request adds: its salt, the tenant that the salt stands for, and its adapter."""
    lora = getattr(request, "lora_request", None)
    adapter = f"{lora.lora_name}:{lora.lora_int_id}:{lora.lora_path}" if lora else ""
    salt = request.cache_salt or ""
    return replace(engine, salt=salt, tenant=name_tenant(salt), adapter=adapter)
