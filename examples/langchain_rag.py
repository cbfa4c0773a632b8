"""Retrieval with LangChain: documents in an order that earlier prompts had, so that a prefix cache finds them.

python examples/langchain_rag.py        needs pip install '.[langchain]' in the checkout
"""

import random
import sys

try:
    from langchain_core.documents import Document
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import RunnableLambda
except ModuleNotFoundError as error:
    sys.exit(f"the package {error.name} is not installed\nhint: pip install '.[langchain]' in the checkout")

from semblend.integration.langchain import ArrangeDocuments

CORPUS = [Document(f"Passage {n}. " + f"Shelf {n} holds {n * 37 % 90} boxes. " * 20, id=str(n)) for n in range(12)]
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from the passages."), ("human", "{context}\n\n{question}")]
)
SEEN: list[str] = []


def count_prefix(text: str) -> int:
    """The longest beginning that an earlier prompt had, in characters: what a prefix cache would hold."""
    longest = max((_common(text, other) for other in SEEN), default=0)
    SEEN.append(text)
    return longest


def _common(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def make_chain(arrange):
    """Retriever, arranger, prompt; a chat model would come next."""
    retrieve = RunnableLambda(lambda asked: asked | {"documents": RANDOM.sample(CORPUS, 4)})
    order = RunnableLambda(lambda asked: asked | {"documents": arrange(asked["documents"])})
    join = RunnableLambda(lambda asked: asked | {"context": "\n\n".join(d.page_content for d in asked["documents"])})
    return retrieve | order | join | PROMPT


for name, arrange in (("as retrieved", list), ("arranged", ArrangeDocuments().transform_documents)):
    RANDOM, SEEN = random.Random(7), []
    chain = make_chain(arrange)
    held = total = 0
    for number in range(40):
        text = chain.invoke({"question": f"Question {number}?"}).to_string()
        held, total = held + count_prefix(text), total + len(text)
    print(f"{name:12} {held / total:.0%} of {total} characters begin as an earlier prompt did")
