"""The backend for any OpenAI-compatible gateway: ``/v1/chat/completions``, streamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sembench.backends.base import (
    PromptCall,
    ServerAnswer,
    add_cache_fields,
    build_headers,
    collect_ids,
    convert_to_ms,
    list_cards,
    list_malformed,
    measure_times,
    read_logprob,
    read_route,
)
from sembench.backends.http_client import Exchange, JsonObject, get_json, post_empty, post_stream
from sembench.values import read_count

if TYPE_CHECKING:
    import httpx

CHAT = "/v1/chat/completions"


class GatewayBackend:
    """Sends recipients to the gateway, and donors to ``donor_url``; if that is empty, donors go to the gateway too."""

    name = "gateway"

    def __init__(
        self,
        client: httpx.AsyncClient,
        gateway_url: str,
        model: str,
        *,
        donor_url: str = "",
        reset_urls: Sequence[str] = (),
        keys: Mapping[str, str] | None = None,
        tokenizer: str = "",
    ) -> None:
        self._client = client
        self._gateway = gateway_url
        self._donor = donor_url or gateway_url
        self._model = model
        self._resets = tuple(reset_urls)
        self._keys = dict(keys or {})
        self._tokenizer = tokenizer or model

    async def ask(self, call: PromptCall, *, donor: bool = False) -> ServerAnswer:
        url = (self._donor if donor else self._gateway) + CHAT
        headers = build_headers(
            call, self._keys, **{"x-tokenizer-id": self._tokenizer, "x-chat-template-id": call.template}
        )
        exchange = await post_stream(self._client, url, build_body(call, self._model), headers)
        return build_answer(exchange, call)

    async def flush(self) -> str | None:
        return await post_empty(self._client, self._resets)

    async def list_models(self) -> tuple[Sequence[str], str | None]:
        listed, error = await get_json(self._client, f"{self._gateway}/v1/models")
        if error is not None or not isinstance(listed, dict):
            return (), error or "the list of models is not an object"
        return list_cards(listed), None


def build_body(call: PromptCall, model: str) -> JsonObject:
    body: JsonObject = {
        "model": model,
        "messages": [dict(one) for one in call.messages] or [{"role": "user", "content": call.text}],
        "max_tokens": call.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if call.tools:
        body["tools"] = list(call.tools)
    if call.top_logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": call.top_logprobs}
    return add_cache_fields(body, call)


def build_answer(exchange: Exchange, call: PromptCall) -> ServerAnswer:
    ttft, gaps = measure_times(exchange, lambda event: bool(_extract_text(event)))
    usage = _find_last(exchange.events, "usage")
    details = usage.get("prompt_tokens_details")
    details = details if isinstance(details, dict) else {}
    receipt = _find_receipt(exchange.events)
    timings = _find_last(exchange.events, "timings") or _find_last(exchange.events, "metrics")
    logprobs = [row for event in exchange.events for row in _extract_logprobs(event)]
    finish = [choice.get("finish_reason") for event in exchange.events for choice in _list_choices(event)]
    return ServerAnswer(
        text="".join(_extract_text(event) for event in exchange.events),
        ttft_ms=ttft,
        latency_ms=exchange.latency_ms,
        inter_token_ms=gaps,
        prompt_tokens=read_count(usage.get("prompt_tokens")),
        output_tokens=read_count(usage.get("completion_tokens")),
        tokens=tuple(str(row.get("token")) for row in logprobs),
        token_logprobs=tuple(read_logprob(row.get("logprob")) for row in logprobs),
        top_logprobs=tuple(
            {str(one.get("token")): read_logprob(one.get("logprob")) for one in _list_objects(row.get("top_logprobs"))}
            for row in logprobs
        ),
        finish_reason=next((str(one) for one in reversed(finish) if one), None),
        receipt=receipt or None,
        cached_tokens=read_count(details.get("cached_tokens")),
        cached_exact=read_count(details.get("exact_tokens")),
        cached_semantic=read_count(details.get("semantic_tokens", details.get("fuzzy_tokens"))),
        engine_ttft_ms=convert_to_ms(timings.get("time_to_first_token")),
        queue_time_ms=convert_to_ms(timings.get("queue_time")),
        ids=collect_ids(
            call.request_id,
            exchange.headers.get("x-request-id"),
            exchange.events[0].get("id") if exchange.events else None,
            receipt.get("request_id"),
        ),
        malformed=list_malformed(usage=usage, details=details, receipt=receipt),
        route=read_route(exchange.headers),
        error=exchange.error or (None if exchange.events else "an empty answer"),
        connection_failed=exchange.connection_failed,
    )


def _find_receipt(events: Sequence[JsonObject]) -> JsonObject:
    """Return the receipt: at the top of an event, or where vLLM puts what a connector says."""
    receipt = _find_last(events, "semblend") or _find_last(events, "kv_transfer_params").get("semblend")
    return receipt if isinstance(receipt, dict) else {}


def _list_objects(value: Any) -> list[JsonObject]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _list_choices(event: JsonObject) -> list[JsonObject]:
    return _list_objects(event.get("choices"))


def _extract_text(event: JsonObject) -> str:
    """Return the text of an event. An answer that is not streamed has a message instead of a delta."""
    said = []
    for choice in _list_choices(event)[:1]:
        part = choice.get("delta") or choice.get("message")
        if isinstance(part, dict):
            said.append(str(part.get("content") or part.get("reasoning_content") or ""))
    return "".join(said)


def _extract_logprobs(event: JsonObject) -> list[JsonObject]:
    rows: list[JsonObject] = []
    for choice in _list_choices(event)[:1]:
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict):
            rows.extend(_list_objects(logprobs.get("content")))
    return rows


def _find_last(events: Sequence[JsonObject], name: str) -> dict[str, Any]:
    return next((event[name] for event in reversed(events) if isinstance(event.get(name), dict)), {})
