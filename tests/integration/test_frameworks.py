"""LangChain documents and LlamaIndex nodes, through the real packages."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from semblend.arrange import Arranger, OrderLimits
from semblend.errors import InputError

TEXTS = ["alpha text", "beta text", "gamma text"]


class TestLangChain:
    @pytest.fixture
    def documents(self):
        core = pytest.importorskip("langchain_core.documents", reason="langchain-core is not installed")
        return [
            core.Document(page_content=text, metadata={"id": text, "rank": 3 - at}) for at, text in enumerate(TEXTS)
        ]

    def test_documents_follow_an_earlier_order_and_say_where_they_stood(self, documents):
        from semblend.integration.langchain import ArrangeDocuments

        transformer = ArrangeDocuments()
        assert [one.metadata["id"] for one in transformer.transform_documents(documents)] == TEXTS
        turned = transformer.transform_documents(documents[::-1])
        assert [one.page_content for one in turned] == TEXTS
        assert [one.metadata["semblend_place"] for one in turned] == [2, 1, 0]
        assert "semblend_place" not in documents[0].metadata, "the caller's documents are left alone"
        again = asyncio.run(transformer.atransform_documents(documents[::-1]))
        assert [one.page_content for one in again] == TEXTS

    def test_relevance_may_bound_what_moves(self, documents):
        from semblend.integration.langchain import ArrangeDocuments

        arranger = Arranger()
        ArrangeDocuments(arranger).transform_documents(documents[::-1])
        kept = ArrangeDocuments(arranger, keep=OrderLimits(displaced=0.0), score_key="rank").transform_documents(
            documents
        )
        assert [one.page_content for one in kept] == TEXTS
        with pytest.raises(InputError, match="no number"):
            ArrangeDocuments(arranger, score_key="id").transform_documents(documents)


class TestLlamaIndex:
    @pytest.fixture
    def nodes(self):
        schema = pytest.importorskip("llama_index.core.schema", reason="llama-index-core is not installed")
        nodes = [schema.TextNode(text=text, id_=text) for text in TEXTS]
        return [schema.NodeWithScore(node=node, score=3.0 - at) for at, node in enumerate(nodes)]

    def test_nodes_follow_an_earlier_order_with_their_ids_and_scores(self, nodes):
        from semblend.integration.llama_index import ArrangeNodes

        arrange = ArrangeNodes()
        assert arrange.postprocess_nodes(nodes) == nodes
        turned = arrange.postprocess_nodes(nodes[::-1], query_str="which?")
        assert [one.node.node_id for one in turned] == TEXTS
        assert [one.score for one in turned] == [3.0, 2.0, 1.0]
        assert asyncio.run(arrange.apostprocess_nodes(nodes[::-1])) == nodes

    def test_scores_may_bound_what_moves(self, nodes):
        from semblend.integration.llama_index import ArrangeNodes

        arranger = Arranger()
        ArrangeNodes(arranger=arranger).postprocess_nodes(nodes[::-1])
        assert ArrangeNodes(arranger=arranger, keep=OrderLimits(displaced=0.0)).postprocess_nodes(nodes) == nodes


@pytest.mark.parametrize(
    ("package", "module"),
    [("langchain_core", "langchain"), ("langchain", "langchain_agents"), ("llama_index", "llama_index")],
)
def test_without_the_package_the_error_names_the_extra(package, module):
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from semblend.errors import MissingDependencyError\n"
        f"try:\n    import semblend.integration.{module}\n"
        "except MissingDependencyError as error:\n    print(error.hint)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "semblend-suite[" in done.stdout
