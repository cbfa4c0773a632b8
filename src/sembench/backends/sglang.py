"""The backend for SGLang's native API: ``/generate`` and ``/flush_cache``. The embedded server has it too."""

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
from sembench.values import read_count, read_text

if TYPE_CHECKING:
    import httpx


class SglangBackend:
    """Sends donors and recipients to the same server."""

    name = "sglang"

    def __init__(self, client: httpx.AsyncClient, base_url: str, *, keys: Mapping[str, str] | None = None) -> None:
        self._client = client
        self._base = base_url
        self._keys = dict(keys or {})

    async def ask(self, call: PromptCall, *, donor: bool = False) -> ServerAnswer:
        del donor
        exchange = await post_stream(
            self._client, f"{self._base}/generate", build_body(call), build_headers(call, self._keys)
        )
        return build_answer(exchange, call)

    async def flush(self) -> str | None:
        return await post_empty(self._client, [f"{self._base}/flush_cache"])

    async def list_models(self) -> tuple[Sequence[str], str | None]:
        listed, error = await get_json(self._client, f"{self._base}/v1/models")
        if error is None and isinstance(listed, dict):
            return list_cards(listed), None
        info, error = await get_json(self._client, f"{self._base}/get_model_info")
        return ([str(info.get("model_path"))], None) if isinstance(info, dict) else ((), error)


def build_body(call: PromptCall) -> JsonObject:
    """Return the request body. ``rid`` is our id, so that the engine's log can be joined to our records."""
    body: JsonObject = {
        "text": call.text,
        "sampling_params": {"temperature": 0, "max_new_tokens": call.max_tokens, "ignore_eos": True},
        "stream": True,
        "rid": call.request_id,
    }
    if call.top_logprobs is not None:
        body |= {"return_logprob": True, "top_logprobs_num": call.top_logprobs, "return_text_in_logprobs": True}
    return add_cache_fields(body, call)


def build_answer(exchange: Exchange, call: PromptCall) -> ServerAnswer:
    """Return the answer. SGLang repeats the whole text in each event, so the last event has everything."""
    ttft, gaps = measure_times(exchange, lambda event: bool(event.get("text") or event.get("output_ids")))
    last: JsonObject = exchange.events[-1] if exchange.events else {}
    meta = last.get("meta_info")
    meta = meta if isinstance(meta, dict) else {}
    details = meta.get("cached_tokens_details")
    details = details if isinstance(details, dict) else {}
    receipt = _find_receipt(last.get("semblend"), meta.get("semblend"))
    positions = meta.get("output_top_logprobs")
    finish = meta.get("finish_reason")
    drawn = _read_rows(meta.get("output_token_logprobs"))
    return ServerAnswer(
        text=str(last.get("text") or ""),
        ttft_ms=ttft,
        latency_ms=exchange.latency_ms,
        inter_token_ms=gaps,
        prompt_tokens=read_count(meta.get("prompt_tokens")),
        output_tokens=read_count(meta.get("completion_tokens")),
        token_ids=_read_ids(last.get("output_ids")) or _read_ids([row[1] for row in drawn]),
        tokens=tuple(_name_token(row) for row in drawn),
        token_logprobs=tuple(read_logprob(row[0]) for row in drawn),
        top_logprobs=tuple(
            {_name_token(row): read_logprob(row[0]) for row in _read_rows(position)}
            for position in (positions if isinstance(positions, list) else ())
        ),
        finish_reason=read_text(finish.get("type") if isinstance(finish, dict) else finish),
        receipt=receipt or None,
        cached_tokens=read_count(meta.get("cached_tokens")),
        cached_exact=read_count(details.get("exact", details.get("device"))),
        cached_semantic=read_count(details.get("fuzzy")),
        queue_time_ms=convert_to_ms(meta.get("queue_time")),
        ids=collect_ids(
            call.request_id, exchange.headers.get("x-request-id"), meta.get("id"), receipt.get("request_id")
        ),
        malformed=list_malformed(meta_info=meta, details=details, receipt=receipt),
        route=read_route(exchange.headers),
        error=exchange.error or (None if exchange.events else "an empty answer"),
        connection_failed=exchange.connection_failed,
    )


def _find_receipt(*places: Any) -> JsonObject:
    """Return the receipt of an answer; SGLang wraps what a request's own processes say in a list."""
    found = (place[0] if isinstance(place, list) and place else place for place in places)
    return next((one for one in found if isinstance(one, dict)), {})


def _read_rows(value: Any) -> list[Sequence[Any]]:
    """Return rows of [logprob, token id, text or null]; other values are left out."""
    rows = value if isinstance(value, list) else []
    return [row for row in rows if isinstance(row, list) and len(row) >= 2 and row[0] is not None]


def _name_token(row: Sequence[Any]) -> str:
    return str(row[2]) if len(row) > 2 and row[2] is not None else f"#{row[1]}"


def _read_ids(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) and all(isinstance(one, int) for one in value) else ()
