"""A model's chat template: Jinja text that comes with the model, so it runs in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from semblend.errors import InputError, MissingDependencyError


class ChatTemplate:
    """Messages to the text that the model was trained on."""

    def __init__(self, source: str, tokens: Mapping[str, str], where: str, tool_source: str | None = None) -> None:
        self._where = where
        self._tokens = dict(tokens)
        self._plain = _compile(source, where)
        self._with_tools = self._plain if tool_source is None else _compile(tool_source, where)

    @classmethod
    def of(cls, found: Any, tokens: Mapping[str, str], where: str) -> ChatTemplate | None:
        """From what a model's files hold: a template, or a list of named ones, or nothing."""
        if isinstance(found, list):  # [{"name": ..., "template": ...}]
            found = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, Mapping)}
        if isinstance(found, Mapping):
            default = found.get("default")
            return None if default is None else cls(str(default), tokens, where, found.get("tool_use"))
        return cls(found, tokens, where) if isinstance(found, str) and found else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """The text of a conversation; by default it ends where the assistant is to speak.

        >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}", {}, "here")
        >>> template.render([{"role": "user", "content": "hi"}])
        'user: hi;'
        """
        from jinja2 import TemplateError

        template = self._with_tools if tools else self._plain
        values = {**self._tokens, "documents": None, **options}
        try:
            return str(
                template.render(
                    **values,
                    messages=[dict(message) for message in messages],
                    tools=list(tools) if tools else None,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise InputError(
                f"the chat template of {self._where} refuses these messages: {error}",
                hint="messages are a list of {role, content}; some models take no system role or no tools",
            ) from None


def _compile(source: str, where: str) -> Any:
    try:
        import jinja2
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise MissingDependencyError(
            "chat templates need the package jinja2", hint="pip install 'semblend-suite[local]'"
        ) from None

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's words for training; here they are only printed."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"the chat template of {where} is not valid: {error}", hint="pull the model again") from None


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as models saw it in training: not escaped for HTML, which Jinja's own filter does."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
