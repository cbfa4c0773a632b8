"""A LlamaIndex node postprocessor that puts retrieved nodes in an order that earlier prompts had."""

from __future__ import annotations

from typing import Any

from semblend.arrange import Arranger, OrderLimits
from semblend.errors import MissingDependencyError
from semblend.prompt import Namespace

try:
    from llama_index.core.bridge.pydantic import Field
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
except ImportError:
    raise MissingDependencyError(
        "the node postprocessor needs llama-index-core", hint="pip install 'semblend-suite[llama-index]'"
    ) from None


class ArrangeNodes(BaseNodePostprocessor):
    """Reorders nodes; they keep their ids and scores, so citations still name the right one.

    Put it last of the postprocessors. A passage is what a response synthesizer puts into the prompt: the node with the
    metadata that is meant for the model. ``before`` is what stands in front of the nodes in the prompt. Scores are used
    where ``keep.displaced`` asks for them. An order counts as sent when it is made.
    """

    arranger: Any = Field(default_factory=Arranger, exclude=True)
    namespace: Any = Field(default=None, exclude=True)
    before: str = ""
    keep: Any = Field(default_factory=OrderLimits, exclude=True)

    @classmethod
    def class_name(cls) -> str:
        return "ArrangeNodes"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        del query_bundle
        arranger: Arranger = self.arranger
        keep: OrderLimits = self.keep
        namespace: Namespace | None = self.namespace
        found = arranger.arrange(
            [node.node.get_content(metadata_mode=MetadataMode.LLM) for node in nodes],
            namespace=namespace,
            before=self.before,
            keep=keep,
            scores=[node.get_score(raise_error=True) for node in nodes] if keep.displaced is not None else None,
        )
        arranger.record(found)
        return [nodes[index] for index in found.order]
