"""Traffic from real text: people's chats, agents' runs, questions with their passages; only arrivals are drawn.

The folder has ``chat/``, ``agent_traces/`` and ``rag/`` with JSON Lines files (plain or .gz). Real: every text, its
order inside a chat or a run, and the pauses of an agent. Drawn from the seed: when sessions begin, how long people
think, which questions are popular and in which order a retriever returned the passages.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from semantickv.traces.segmentation import Segmenter, TextBlock
from semantickv.traces.trace import Trace, TraceRequest
from semantickv.workloads.families import Arrivals
from semblend.errors import InputError
from semblend.text.log_lines import open_log, read_lines

BLOCK_TOKENS = 128
TEXT_ARRIVALS: Final = Arrivals("poisson", rate=0.5, think_s=20.0)
_RAG_SYSTEM = "Answer the question from the passages below. Say so if they do not contain the answer.\n\n"
_RAG_FILES = ("cacheblend_musique_s", "hotpotqa_distractor")
_AGENT_FILES = ("miniswe", "magagent", "taubench")
_TEXTS_REMEMBERED = 50_000


@dataclass(frozen=True)
class TextSource:
    """Where the text is and how it becomes traffic. ``sessions`` None takes all sessions."""

    folder: Path
    seed: int = 0
    sessions: int | None = None
    arrivals: Arrivals = TEXT_ARRIVALS
    block_tokens: int = BLOCK_TOKENS

    def read_lines(self, relative: str) -> Iterator[dict[str, Any]]:
        """Read the objects of ``relative``.jsonl or .jsonl.gz."""
        for suffix in (".jsonl.gz", ".jsonl"):
            path = self.folder / f"{relative}{suffix}"
            if path.exists():
                with open_log(path) as stream:
                    yield from (json.loads(line) for _, line in read_lines(stream) if line is not None)
                return
        raise InputError(
            f"{self.folder / relative}.jsonl[.gz] is not there", hint="--data-dir is a folder with chat, rag, ..."
        )

    def build_segmenter(self) -> Segmenter:
        """Build the segmenter that cuts texts into blocks of at most ``block_tokens``."""
        return Segmenter(max_block_tokens=self.block_tokens)


def generate_chats(source: TextSource) -> Iterator[TraceRequest]:
    """Generate one request for each user turn of a chat, with all turns before it."""
    cut = _remember_results(source.build_segmenter().cut_text)
    conversations = [line["conversations"] for line in source.read_lines("chat/sharegpt_multiturn")]
    random.Random(f"chats {source.seed}").shuffle(conversations)
    taken = conversations[: source.sessions]
    for number, start in enumerate(source.arrivals.draw_starts(len(taken), source.seed)):
        rng, at_s, blocks = random.Random(f"chat {source.seed} {number}"), start, list[TextBlock]()
        for turn, message in enumerate(taken[number]):
            blocks.extend(cut(message["content"], message["role"]))
            if message["role"] == "user" and blocks:
                yield _build_request(f"chat-{number:05d}-{turn:03d}", at_s, blocks, session=f"chat-{number:05d}")
                at_s += source.arrivals.draw_think_s(rng)


def generate_agent_runs(source: TextSource) -> Iterator[TraceRequest]:
    """Generate one request for each call of an agent's run, with the recorded pauses."""
    cut = source.build_segmenter().cut_text
    runs: dict[str, list[dict[str, Any]]] = {}
    for file in _AGENT_FILES:
        for line in source.read_lines(f"agent_traces/{file}"):
            if line["input"]:
                runs.setdefault(f"{file}-{line['session']}", []).append(line)
    names = sorted(runs)
    random.Random(f"agents {source.seed}").shuffle(names)
    names = names[: source.sessions]
    for name, start in zip(names, source.arrivals.draw_starts(len(names), source.seed), strict=True):
        first = runs[name][0]["timestamp"]
        for call in runs[name]:
            at_s = start + max(0.0, (call["timestamp"] - first) / 1e6)
            blocks = cut(call["input"], "user")
            yield _build_request(
                f"{name}-{call['step']:03d}", at_s, blocks, session=name, tenant=name.partition("-")[0]
            )


def generate_rag(source: TextSource) -> Iterator[TraceRequest]:
    """Generate questions with their passages: some questions are popular, and the order of passages changes."""
    items = [item for file in _RAG_FILES for item in source.read_lines(f"rag/{file}")]
    rng = random.Random(f"rag {source.seed}")
    rng.shuffle(items)
    cut = _remember_results(source.build_segmenter().cut_text)
    weights = [1.0 / (rank + 1) ** 0.8 for rank in range(len(items))]
    for number, at_s in enumerate(source.arrivals.draw_starts(source.sessions or 4 * len(items), source.seed)):
        item = rng.choices(items, weights)[0]
        passages = [f"Document: {passage['title']}\n{passage['text']}\n\n" for passage in item["ctxs"]]
        rng.shuffle(passages)
        blocks = [*cut(_RAG_SYSTEM, "system")]
        for passage in passages:
            blocks.extend(cut(passage, "user"))
        blocks.extend(cut(f"Question: {item['question']}", "user"))
        yield _build_request(f"rag-{number:06d}", at_s, blocks, session=f"rag-{number:06d}")


TEXT_WORKLOADS: Final[Mapping[str, Callable[[TextSource], Iterator[TraceRequest]]]] = MappingProxyType(
    {"chats": generate_chats, "agents": generate_agent_runs, "rag": generate_rag}
)


def generate_text_workload(name: str, source: TextSource) -> Trace:
    """Generate the trace of a text workload, in order of arrival."""
    if name not in TEXT_WORKLOADS:
        raise InputError(f"unknown text workload {name!r}", hint="one of " + ", ".join(TEXT_WORKLOADS))
    try:
        requests = sorted(TEXT_WORKLOADS[name](source), key=lambda request: (request.arrival_s, request.request_id))
    except (KeyError, TypeError, ValueError, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the text of {name} under {source.folder} cannot be used: {error!r}") from None
    return Trace.from_requests(requests, name=name)


def _build_request(name: str, at_s: float, blocks: Sequence[TextBlock], **known: str) -> TraceRequest:
    """Build the request of these blocks."""
    return TraceRequest(
        name,
        round(at_s, 6),
        tuple(block.content_id for block in blocks),
        tuple(block.tokens for block in blocks),
        tuple(block.type for block in blocks),
        **known,  # type: ignore[arg-type]  # session and tenant
    )


def _remember_results(cut: Callable[[str, str], tuple[TextBlock, ...]]) -> Callable[[str, str], tuple[TextBlock, ...]]:
    """Return ``cut`` with its results kept for texts that come again."""
    return lru_cache(maxsize=_TEXTS_REMEMBERED)(cut)
