"""A LangChain agent middleware that edits the history in batches, in place of `ContextEditingMiddleware`.

LangChain, because its middleware sees the messages of every call and the settings of that call, so that an edit can be
told to the engine with the request that makes it; because the agent's own state keeps the whole history, which is what
`HistoryEditor` replays; and because its own editing clears one more result with every step beyond its trigger.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from semblend.arrange.history import HistoryEdit, HistoryEditor, Mark, Message
from semblend.errors import MissingDependencyError

try:
    from langchain.agents.middleware.types import AgentMiddleware, ModelRequest, ModelResponse
    from langchain_core.messages import AIMessage, AnyMessage, ToolMessage
except ImportError:
    raise MissingDependencyError(
        "the agent middleware needs langchain 1.1 or later", hint="pip install 'semblend-suite[langchain-agents]'"
    ) from None

OnEdit = Callable[[HistoryEdit], None]
_ROLES = {"human": "user", "ai": "assistant", "tool": "tool", "system": "system", "function": "function"}


class EditHistory(AgentMiddleware):
    """Shortens what the model is sent; the agent's state keeps every message.

    ``on_edit`` is told of each edit before the request that makes it. With ``declare`` the request says under
    ``extra_body`` what was removed since the last one: only for engines with SemBlend, others may refuse the field.
    """

    def __init__(
        self, editor: HistoryEditor | None = None, *, on_edit: OnEdit | None = None, declare: bool = False
    ) -> None:
        super().__init__()
        self.editor, self._on_edit, self._declare = editor or HistoryEditor(), on_edit, declare

    def wrap_model_call(self, request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
        return handler(self.shorten(request))

    async def awrap_model_call(
        self, request: ModelRequest, handler: Callable[[ModelRequest], Awaitable[ModelResponse]]
    ) -> ModelResponse:
        return await handler(self.shorten(request))

    def shorten(self, request: ModelRequest) -> ModelRequest:
        """The request with the messages that are to be sent; the very same where nothing was ever removed."""
        system = request.system_message
        whole = [*([] if system is None else [system]), *request.messages]
        answers = [one for one in whole if isinstance(one, AIMessage)]
        base = str(answers[-1].response_metadata.get("id") or "") if answers else ""
        plain = [_to_plain(one) for one in whole]
        marks, edit, _, _ = self.editor.decide([self.editor.read(one) for one in plain], base=base)
        if not any(marks):
            return request
        messages = [
            self._shorten(message, one) if mark is Mark.LEAN else message
            for message, one, mark in zip(whole, plain, marks, strict=True)
            if mark is not Mark.DROPPED and message is not system
        ]
        if edit.removals and self._on_edit is not None:
            self._on_edit(edit)
        settings = (
            _add_edit(request.model_settings, edit) if edit.removals and self._declare else request.model_settings
        )
        return request.override(messages=messages, model_settings=settings)

    def _shorten(self, message: AnyMessage, plain: Message) -> AnyMessage:
        content = self.editor.shorten(plain)["content"]
        if isinstance(message, ToolMessage):
            return message.model_copy(update={"content": content, "artifact": None})
        more = {key: value for key, value in message.additional_kwargs.items() if key != "reasoning_content"}
        return message.model_copy(update={"content": content, "additional_kwargs": more})


def _to_plain(message: AnyMessage) -> Message:
    """The message as OpenAI writes it, as far as an editor looks at it."""
    plain: dict[str, Any] = {"role": _ROLES.get(message.type, message.type), "content": message.content}
    if isinstance(message, AIMessage):
        calls = [{"id": one["id"], "function": one["name"], "arguments": one["args"]} for one in message.tool_calls]
        plain |= {"tool_calls": calls} if calls else {}
        thought = message.additional_kwargs.get("reasoning_content")
        plain |= {"reasoning_content": thought} if thought else {}
    elif isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _add_edit(settings: dict[str, Any], edit: HistoryEdit) -> dict[str, Any]:
    """Model settings whose request declares an edit, beside whatever it says to the engine already."""
    body = settings.get("extra_body") or {}
    params = body.get("kv_transfer_params") or {}
    params = params | {"semblend": (params.get("semblend") or {}) | {"edit": edit.to_dict()}}
    return settings | {"extra_body": body | {"kv_transfer_params": params}}
