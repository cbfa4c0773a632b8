"""A model's chat template: Jinja text that comes with the model, so it runs in a sandbox.

A control token such as ``<|im_start|>`` counts where the template wrote it, and is plain text where it came with a
message. Both look alike once a conversation is rendered. So the template is compiled a second time with *marked*
literals: in them, each character that begins or ends a control token is replaced by a twin, a Unicode noncharacter.
Messages pass through unchanged: a template that trims a content, splits it or looks into it does what it always did.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from semblend.errors import InputError, MissingDependencyError

# Noncharacters: Unicode keeps them for use inside a program. A message that holds one is not encoded this way.
_TWINS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
# What looks into a text. Literals that are handed to these do not reach the output.
_LOOKING = {
    "split", "rsplit", "startswith", "endswith", "find", "rfind", "index", "rindex", "count", "strip", "lstrip",
    "rstrip", "partition", "rpartition", "removeprefix", "removesuffix", "get", "attr", "select", "reject",
    "selectattr", "rejectattr", "groupby", "sort",
}  # fmt: skip


class Marks:
    """The twins of the characters at the edges of some tokens; false where there are more edges than twins.

    >>> marks = Marks(["<s>", "</s>"])
    >>> marks.take_off(marks.put_on("<s>")) == "<s>" != marks.put_on("<s>")
    True
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        edges = sorted({edge for token in tokens for edge in (token[0], token[-1])})
        self._complete = len(edges) <= len(_TWINS)
        self.twins = dict(zip(edges, _TWINS, strict=False))
        self._put_on = str.maketrans(self.twins)
        self._take_off = str.maketrans({twin: edge for edge, twin in self.twins.items()})

    def __bool__(self) -> bool:
        return self._complete

    def put_on(self, text: str) -> str:
        return text.translate(self._put_on)

    def take_off(self, text: str) -> str:
        return text.translate(self._take_off)

    def mark_template(self, tree: Any) -> Any:
        """Mark, in place, all text of a parsed template that can reach its output; returns the tree."""
        self._mark(tree, True)
        return tree

    def _mark(self, node: Any, flows: bool) -> None:
        """``flows``: the node's value can become output. What only decides something is left as it is."""
        from jinja2 import nodes

        if isinstance(node, nodes.TemplateData):
            node.data = self.put_on(node.data)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str) and flows:
            node.value = self.put_on(node.value)
        for name, value in node.iter_fields():
            children = value if isinstance(value, list) else [value]
            for place, child in enumerate(children):
                if isinstance(child, nodes.Node):
                    self._mark(child, flows and not _only_decides(node, name, place))


def _only_decides(node: Any, field: str, place: int) -> bool:
    """Whether a child, by its field and its place there, is looked at and never printed."""
    from jinja2 import nodes

    if isinstance(node, (nodes.Compare, nodes.Test, nodes.Not)):
        return True
    if isinstance(node, nodes.Getitem):
        return field == "arg"
    if isinstance(node, nodes.Pair):
        return field == "key"
    if isinstance(node, nodes.Filter):
        called = node.name
    elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        called = node.node.attr
    else:
        return False
    if field not in ("args", "kwargs"):
        return False
    return called in _LOOKING or (called == "replace" and place == 0)


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
