"""A LangChain document transformer that puts retrieved documents in an order that earlier prompts had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from semblend.arrange import Arranger, OrderLimits
from semblend.errors import InputError, MissingDependencyError
from semblend.prompt import Namespace

try:
    from langchain_core.documents import BaseDocumentTransformer, Document
except ImportError:
    raise MissingDependencyError(
        "the document transformer needs langchain-core", hint="pip install 'semblend-suite[langchain]'"
    ) from None

PLACE = "semblend_place"


class ArrangeDocuments(BaseDocumentTransformer):
    """Reorders documents; each says in its metadata, under ``semblend_place``, where it stood before.

    Put it behind the retriever and in front of the prompt. ``render`` gives the text as the prompt will hold it: the
    page's content alone unless told otherwise. ``before`` is what stands in front of the documents in the prompt.
    ``score_key`` names the relevance in the metadata, for ``keep.displaced``. An order counts as sent when it is made.
    """

    def __init__(
        self,
        arranger: Arranger | None = None,
        *,
        namespace: Namespace | None = None,
        before: str = "",
        keep: OrderLimits | None = None,
        render: Callable[[Document], str] | None = None,
        score_key: str = "",
    ) -> None:
        self.arranger = Arranger() if arranger is None else arranger
        self._namespace, self._before, self._keep = namespace, before, keep or OrderLimits()
        self._render = render or (lambda document: document.page_content)
        self._score_key = score_key

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> Sequence[Document]:
        """The documents in their new order."""
        del kwargs
        found = self.arranger.arrange(
            [self._render(document) for document in documents],
            namespace=self._namespace,
            before=self._before,
            keep=self._keep,
            scores=[self._read_score(document) for document in documents] if self._score_key else None,
        )
        self.arranger.record(found)
        return [
            documents[index].model_copy(update={"metadata": documents[index].metadata | {PLACE: index}})
            for index in found.order
        ]

    def _read_score(self, document: Document) -> float:
        score = document.metadata.get(self._score_key)
        if not isinstance(score, (int, float)):
            raise InputError(f"a document has no number under {self._score_key!r}", hint="leave score_key out")
        return float(score)
