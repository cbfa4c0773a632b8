"""A model's chat template: Jinja text that comes with the model, so it runs in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from semblend.engine.model.template_marks import Marks
from semblend.errors import InputError, MissingDependencyError


class ChatTemplate:
    """Messages to the text that the model was trained on."""

    def __init__(self, source: str, tokens: Mapping[str, str], where: str, tool_source: str | None = None) -> None:
        self._where = where
        self._tokens = dict(tokens)
        self._sources = (source, source if tool_source is None else tool_source)
        self._compiled: dict[Marks | None, tuple[Any, Any]] = {}
        self._compile(None)

    @classmethod
    def of(cls, found: Any, tokens: Mapping[str, str], where: str) -> ChatTemplate | None:
        """From what a model's files hold: a template, or a list of named ones, or nothing."""
        if isinstance(found, list):  # [{"name": ..., "template": ...}]
            found = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, Mapping)}
        if isinstance(found, Mapping):
            default = found.get("default")
            return None if default is None else cls(str(default), tokens, where, found.get("tool_use"))
        return cls(found, tokens, where) if isinstance(found, str) and found else None

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of a conversation; by default it ends where the assistant is to speak.

        >>> template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}", {}, "here")
        >>> template.render([{"role": "user", "content": "hi"}])
        'user: hi;'
        """
        return "".join(self.write(messages, **options))

    def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        marks: Marks | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """The text of a conversation piece by piece. With ``marks``, the template's own text has them."""
        from jinja2 import TemplateError

        template = self._compile(marks)[1 if tools else 0]
        tokens = self._tokens if marks is None else {name: marks.put_on(text) for name, text in self._tokens.items()}
        values = {**tokens, "documents": None, **options}
        try:
            yield from template.generate(
                **values,
                messages=[dict(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, KeyError, OverflowError) as error:
            raise InputError(
                f"the chat template of {self._where} refuses these messages: {error}",
                hint="messages are a list of {role, content}; some models take no system role or no tools",
            ) from None

    def _compile(self, marks: Marks | None) -> tuple[Any, Any]:
        """The template without and with tools; compiled once for each kind of marks."""
        if marks not in self._compiled:
            plain = _compile(self._sources[0], self._where, marks)
            same = self._sources[0] == self._sources[1]
            self._compiled[marks] = (plain, plain if same else _compile(self._sources[1], self._where, marks))
        return self._compiled[marks]


def _compile(source: str, where: str, marks: Marks | None) -> Any:
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
        return environment.from_string(source if marks is None else marks.mark_template(environment.parse(source)))
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"the chat template of {where} is not valid: {error}", hint="pull the model again") from None


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as models saw it in training: not escaped for HTML, which Jinja's own filter does."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
