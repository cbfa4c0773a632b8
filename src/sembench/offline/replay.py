"""Offline replay: what an exact cache would have, what a planner proposes, and how much of that is right."""

from __future__ import annotations

import hashlib
import importlib
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sembench.manifests.blocks import HashSet, hash_content, hash_prefixes
from sembench.manifests.cases import Case
from sembench.offline.planners import Proposal, ReusePlanner
from sembench.result import RequestRecord
from semblend.errors import InputError, MissingDependencyError, SemBlendError
from semblend.prompt import Prompt, TokenArray
from semblend.text.tokenization import STABLE, TOKENIZER_FILE, FileTokenizer, StableTokenizer, load_tokenizer

# -- tokenizers ------------------------------------------------------------------------------------------------------
# Loads tokenizers: ``stable``, a Hugging Face tokenizer (file, folder or name), or ``tiktoken:ENCODING``.
#
# A name such as ``Qwen/Qwen2.5-7B-Instruct`` is looked for in the local cache; ``hub:NAME`` fetches it. Where the cache
# does not have it, a stand-in takes its place, and that is said twice: on standard error and in the result. No code of
# a model is ever run.

TIKTOKEN = "tiktoken"
TOKENIZER_HELP = "stable, a tokenizer.json, a model name or tiktoken:NAME (default: stable)"
_HUB = "hub:"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Pulled models whose tokenizer may stand in, the most similar first. All Qwen2.5 models share one vocabulary and one
# list of merges, so the coder's gives the same ids for plain text; SmolLM2 has another vocabulary of the same kind.
_KIN = (
    (re.compile(r"qwen", re.IGNORECASE), ("qwen2.5-coder-1.5b", "smollm2-135m")),
    (re.compile(r""), ("smollm2-135m", "qwen2.5-coder-1.5b")),
)


class TextEncoder(Protocol):
    def encode(self, text: str) -> TokenArray:
        """Return the token ids of a text, without special tokens."""


@dataclass(frozen=True, slots=True)
class ChosenTokenizer:
    """A tokenizer, the name that was asked for, and the name of what is used."""

    encoder: TextEncoder
    asked: str
    used: str
    stand_in: bool = False
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return what a result file keeps about the tokenizer."""
        return {"asked": self.asked, "used": self.used, "stand_in": self.stand_in, "note": self.note}


def choose_tokenizer(name: str | None, *, allow_stand_in: bool = True) -> ChosenTokenizer:
    """Return the tokenizer of that name, or a stand-in where that is allowed.

    >>> choose_tokenizer(None).used
    'stable'
    """
    asked = STABLE if name is None else name
    if asked == STABLE:
        return ChosenTokenizer(StableTokenizer(), asked, STABLE)
    if asked == TIKTOKEN or asked.startswith(f"{TIKTOKEN}:"):
        return _load_tiktoken(asked)
    if asked.startswith(_HUB):
        return ChosenTokenizer(_fetch_tokenizer(asked.removeprefix(_HUB)), asked, asked)
    try:
        return ChosenTokenizer(load_tokenizer(asked), asked, asked)
    except InputError:
        if not _HUB_NAME.fullmatch(asked):
            raise
    if not allow_stand_in:
        raise InputError(
            f"tokenizer {asked} is not in the local Hugging Face cache",
            hint=f"pass the path of its tokenizer.json, or hub:{asked} to fetch it",
        )
    return _choose_stand_in(asked)


def _choose_stand_in(asked: str) -> ChosenTokenizer:
    for pattern, models in _KIN:
        if pattern.search(asked):
            for model in models:
                encoder = _load_pulled_model(model)
                if encoder is not None:
                    note = f"{asked} is not on this machine; the tokenizer of the pulled model {model} stands in"
                    return ChosenTokenizer(encoder, asked, f"model:{model}", stand_in=True, note=note)
    note = f"{asked} is not on this machine, nor is any pulled model; the built-in tokenizer stands in"
    return ChosenTokenizer(StableTokenizer(), asked, STABLE, stand_in=True, note=note)


class _FunctionEncoder:
    """Makes an `TextEncoder` of any function from text to a list of ids."""

    def __init__(self, encode: Callable[[str], Any]) -> None:
        self._encode = encode

    def encode(self, text: str) -> TokenArray:
        return np.asarray(self._encode(text), dtype=np.int32)


def _load_pulled_model(name: str) -> TextEncoder | None:
    from semblend.models import find_model, find_pulled_path, is_pulled

    try:
        model = find_model(name)
        if not is_pulled(model):
            return None
        from semblend.engine.model.tokenizer import ModelTokenizer

        loaded = ModelTokenizer.load(find_pulled_path(model))
    except (SemBlendError, ImportError):
        return None  # a pulled file whose reader is not installed is no stand-in; the next one is tried
    return _FunctionEncoder(lambda text: loaded.encode(text, add_special=False))


def _fetch_tokenizer(name: str) -> FileTokenizer:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise MissingDependencyError(
            "a tokenizer from the hub needs the package huggingface_hub", hint="pip install huggingface_hub"
        ) from None
    try:
        path = hf_hub_download(name, TOKENIZER_FILE)
    except Exception as error:  # no network, no such model, not allowed: the http client's errors share no base
        why = str(error).partition("\n")[0]
        raise InputError(f"cannot fetch the tokenizer of {name}: {why}", hint="pass a tokenizer.json") from None
    return FileTokenizer(Path(path), name)


def _load_tiktoken(asked: str) -> ChosenTokenizer:
    encoding = asked.partition(":")[2] or "cl100k_base"
    try:
        tiktoken = importlib.import_module("tiktoken")
    except ImportError:
        raise MissingDependencyError(
            "tokenizer tiktoken needs the package tiktoken", hint="pip install tiktoken"
        ) from None
    try:
        loaded = tiktoken.get_encoding(encoding)
    except Exception as error:  # an unknown name is a ValueError, a failed download whatever its http client raises
        raise InputError(
            f"tiktoken cannot give {encoding}: {error}", hint="name an encoding whose file is cached, or use stable"
        ) from None
    return ChosenTokenizer(
        _FunctionEncoder(lambda text: loaded.encode(text, disallowed_special=())), asked, f"{TIKTOKEN}:{encoding}"
    )


# -- replay ----------------------------------------------------------------------------------------------------------
# One store keeps every donor of the manifest and the distractors, so that finding the right donor is part of the test;
# ``per-item`` gives every case a store of its own, for comparison with benchmarks that do so. A proposed token counts
# as eligible only when it equals the donor's token at that place, in the copy that the benchmark keeps for itself (on
# disk: memory grows with the planner's own store, not with the texts).

STORES = ("one", "per-item")
Distractor = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ProposalCounts:
    """The counts of a checked proposal. Blocks are full blocks on the recipient's grid."""

    candidate_tokens: int
    candidate_blocks: int
    eligible_tokens: int
    eligible_blocks: int
    wrong_tokens: int


class TokenSpool:
    """Token arrays by name, in a temporary file: the benchmark's own copy of every donor."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="sembench-")  # noqa: SIM115, closed in close()
        self._places: dict[str, tuple[int, int]] = {}
        self._end = 0

    def add(self, name: str, tokens: TokenArray) -> None:
        self._file.seek(self._end)
        self._file.write(tokens.astype("<i4").tobytes())
        self._places[name] = (self._end, len(tokens))
        self._end += 4 * len(tokens)

    def get_length(self, name: str) -> int | None:
        return self._places[name][1] if name in self._places else None

    def read(self, name: str, start: int, length: int) -> TokenArray:
        self._file.seek(self._places[name][0] + 4 * start)
        return np.frombuffer(self._file.read(4 * length), dtype="<i4")

    def __len__(self) -> int:
        return len(self._places)

    def close(self) -> None:
        self._file.close()


def check_proposal(tokens: TokenArray, proposal: Proposal, donors: TokenSpool, block_size: int) -> ProposalCounts:
    """Check every proposed token and count. Where spans overlap, the later one counts.

    A block is a candidate when all its tokens are proposed, and eligible when in addition all of them are equal and
    come from one donor in one piece: what a backend can take over as a block.
    """
    proposed = np.zeros(len(tokens), dtype=np.bool_)
    equal = np.zeros(len(tokens), dtype=np.bool_)
    piece = np.full(len(tokens), -1, dtype=np.int64)
    pieces: dict[tuple[str, int], int] = {}
    wrong = 0
    for span in proposal.spans:
        low, high = max(span.target_start, 0), min(span.target_end, len(tokens))
        wrong += max(0, span.length) - max(0, high - low)  # proposed for positions outside the prompt
        if high <= low:
            continue
        proposed[low:high], equal[low:high] = True, False
        held, start = donors.get_length(span.donor_id), span.donor_start + low - span.target_start
        if held is not None and start >= 0 and start + high - low <= held:
            equal[low:high] = donors.read(span.donor_id, start, high - low) == tokens[low:high]
            piece[low:high] = pieces.setdefault((span.donor_id, start - low), len(pieces))
    blocks = len(tokens) // block_size
    whole = _split_into_blocks(proposed, blocks, block_size).all(axis=1)
    sound = _split_into_blocks(equal, blocks, block_size).all(axis=1)
    owners = piece[: blocks * block_size].reshape(blocks, block_size)
    single = (owners == owners[:, :1]).all(axis=1)
    return ProposalCounts(
        candidate_tokens=int(proposed.sum()),
        candidate_blocks=int(whole.sum()),
        eligible_tokens=int(equal.sum()),
        eligible_blocks=int((sound & single).sum()),
        wrong_tokens=wrong + int((proposed & ~equal).sum()),
    )


def _split_into_blocks(flags: npt.NDArray[np.bool_], blocks: int, block_size: int) -> npt.NDArray[np.bool_]:
    return flags[: blocks * block_size].reshape(blocks, block_size)


class ReplayStore:
    """A planner, the exact caches, and the benchmark's own copy of their donors."""

    def __init__(self, planner: ReusePlanner, encoder: TextEncoder, block_size: int) -> None:
        self.planner = planner
        self.donors = TokenSpool()
        self._encoder = encoder
        self._block_size = block_size
        self._content, self._prefix = HashSet(), HashSet()
        self._digests: dict[str, bytes] = {}

    def add(self, name: str, text: str, item_id: str = "") -> bool:
        """Register a donor. Return False if that text is already there under that name.

        Another text under a known name gets a new name, since a manifest may use short ids more than once.
        """
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if self._digests.get(name) == digest:
            return False
        if name in self._digests:
            name = f"{name}@{item_id}"
            if self._digests.get(name) == digest:
                return False
        tokens = self._encoder.encode(text)
        if not len(tokens):
            return False
        self._digests[name] = digest
        self.donors.add(name, tokens)
        self._content.add(hash_content(tokens, self._block_size))
        self._prefix.add(hash_prefixes(tokens, self._block_size))
        self.planner.register(name, Prompt(tokens, text=text))
        return True

    def add_donors(self, case: Case) -> None:
        for donor in case.donor_prompts:
            self.add(donor.donor_id, donor.text, case.item_id)

    def replay(self, case: Case, arm: str) -> RequestRecord:
        """Replay one recipient: count exact blocks, ask the planner, check what it proposes."""
        tokens = self._encoder.encode(case.recipient_prompt)
        facts: dict[str, Any] = {
            **case.describe(),
            "arm": arm,
            "donor_count": len(case.donor_prompts),
            "prompt_tokens": len(tokens),
            "total_blocks": len(tokens) // self._block_size,
        }
        if not len(tokens):
            return RequestRecord(**facts, error="the recipient has no tokens")
        prompt = Prompt(tokens, text=case.recipient_prompt)
        content = int(self._content.contains(hash_content(tokens, self._block_size)).sum())
        prefix = int(np.logical_and.accumulate(self._prefix.contains(hash_prefixes(tokens, self._block_size))).sum())
        started = time.perf_counter()
        proposal = self.planner.propose(prompt)
        latency_ms = (time.perf_counter() - started) * 1e3
        verdict = check_proposal(tokens, proposal, self.donors, self._block_size)
        return RequestRecord(
            **facts,
            exact_hit_blocks=content,
            exact_hit_tokens=content * self._block_size,
            exact_prefix_hit_blocks=prefix,
            exact_prefix_hit_tokens=prefix * self._block_size,
            semantic_candidate_blocks=verdict.candidate_blocks,
            semantic_candidate_tokens=verdict.candidate_tokens,
            semantic_eligible_blocks=verdict.eligible_blocks,
            semantic_eligible_tokens=verdict.eligible_tokens,
            wrong_tokens=verdict.wrong_tokens,
            semblend_found=bool(proposal.spans),
            semblend_similarity=proposal.similarity,
            semblend_reuse_ratio=verdict.candidate_tokens / len(tokens),
            semblend_latency_ms=round(latency_ms, 4),
            donor_ids=tuple(dict.fromkeys(span.donor_id for span in proposal.spans)),
            rejection_reason=proposal.reason,
        )

    def close(self) -> None:
        self.donors.close()
        close = getattr(self.planner, "close", None)
        if callable(close):
            close()


@dataclass(frozen=True, slots=True)
class OfflineReplay:
    """The plan of a replay. ``cases`` is called for each pass over the manifest, which is never held in memory."""

    cases: Callable[[], Iterable[Case]]
    planner: Callable[[], ReusePlanner]
    encoder: TextEncoder
    block_size: int = 16
    arm: str = "single"
    distractors: Callable[[], Iterable[Distractor]] = tuple

    def replay_in_one_store(
        self, on_progress: Callable[[str, int], None], skip: Callable[[str], bool]
    ) -> Iterator[RequestRecord]:
        """Add distractors and all donors to one store, then replay every recipient that ``skip`` does not know."""
        with self._open_store() as store:
            for name, text in self.distractors():
                store.add(name, text)
                on_progress("distractors", len(store.donors))
            for case in self.cases():
                store.add_donors(case)
                on_progress("donors", len(store.donors))
            for number, case in enumerate(self.cases(), start=1):
                if not skip(case.item_id):
                    yield store.replay(case, self.arm)
                on_progress("recipients", number)

    def replay_per_item(
        self, on_progress: Callable[[str, int], None], skip: Callable[[str], bool]
    ) -> Iterator[RequestRecord]:
        """Replay every case in a store of its own, which holds only its own donors."""
        for number, case in enumerate(self.cases(), start=1):
            if not skip(case.item_id):
                with self._open_store() as store:
                    store.add_donors(case)
                    yield store.replay(case, self.arm)
            on_progress("recipients", number)

    def _open_store(self) -> closing[ReplayStore]:
        return closing(ReplayStore(self.planner(), self.encoder, self.block_size))
