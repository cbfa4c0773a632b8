"""Marks on a chat template's own text, so that what a template wrote can be told from what a message said.

A control token such as ``<|im_start|>`` counts where the template wrote it, and is plain text where it came with a
message. Both look alike once a conversation is rendered. So the template is compiled a second time with *marked*
literals: in them, each character that begins or ends a control token is replaced by a twin, a Unicode noncharacter.
Messages pass through unchanged: a template that trims a content, splits it or looks into it does what it always did.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
