"""The planners that propose reuse: this project's, none, block hashes, LMCache-style chunks, or your own class.

A planner of your own is a class that takes `PlannerOptions` and has two methods::

    class Mine:
        def __init__(self, options: PlannerOptions) -> None: ...
        def register(self, donor_id: str, prompt: Prompt) -> None: ...   # prompt.token_ids, prompt.text
        def propose(self, prompt: Prompt) -> Proposal: ...

and runs as ``--planner my_module:Mine``. What it proposes is checked token by token against the donors that the
benchmark itself keeps: a wrong token is counted as wrong and is never eligible, whatever the planner believes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sembench.manifests.blocks import hash_content, hash_every_offset
from semblend.errors import InputError
from semblend.prompt import Prompt
from semblend.span import Span

_MIN_BYTES = 1 << 26
BUILT_IN = ("ours", "none", "block-hash", "lmcache-chunks")


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """The options of a planner from the command line; None means the planner's own default."""

    block_size: int = 16
    chunk_size: int = 256
    embedder: str | None = None
    min_similarity: float | None = None
    min_reuse_ratio: float | None = None
    multi_donor: bool = True
    capacity_chars: int = 1 << 24  # text of all donors that one store will have to hold


@dataclass(frozen=True, slots=True)
class Proposal:
    """The spans that a planner would reuse, in any order, or the reason why there are none."""

    spans: tuple[Span, ...] = ()
    similarity: float | None = None
    reason: str | None = None


class ReusePlanner(Protocol):
    def register(self, donor_id: str, prompt: Prompt, /) -> None:
        """Remember a donor. Ids are unique; the prompt is read-only and may be kept."""

    def propose(self, prompt: Prompt, /) -> Proposal:
        """Return which donor tokens to copy where. All donors are registered before the first call."""


class SemblendPlanner:
    """This project's library, with room for every donor of the manifest."""

    def __init__(self, options: PlannerOptions) -> None:
        from semblend.config import SemBlendConfig
        from semblend.discover.store import BYTES_PER_TOKEN
        from semblend.facade import SemBlend

        given: dict[str, Any] = {"embedder": options.embedder or "none"}
        if options.min_similarity is not None:
            given["min_similarity"] = options.min_similarity
        if options.min_reuse_ratio is not None:
            given["min_reuse_ratio"] = options.min_reuse_ratio
        self._multi_donor = options.multi_donor
        # Nearly every token has a character or more. The budget reserves address space; memory is taken as it is used.
        room = max(_MIN_BYTES, int(options.capacity_chars * BYTES_PER_TOKEN * 1.25))
        self._blend = SemBlend(SemBlendConfig(max_donors=1 << 24, max_bytes=room, metrics=False, **given))
        self._blend.on_evicted(_refuse_eviction)

    def register(self, donor_id: str, prompt: Prompt) -> None:
        self._blend.register(prompt, donor_id=donor_id)

    def propose(self, prompt: Prompt) -> Proposal:
        from semblend.plan.reuse_plan import Decline

        decision = self._blend.lookup(prompt)
        similarity = max((similar.similarity for similar in decision.evidence), default=None)
        if isinstance(decision, Decline):
            return Proposal((), similarity, str(decision.reason))
        spans = decision.spans if self._multi_donor else _keep_best_donor(decision.spans)
        return Proposal(spans, similarity)

    def close(self) -> None:
        self._blend.close()


class NullPlanner:
    """Proposes nothing, so that only the exact cache counts."""

    def __init__(self, _options: PlannerOptions) -> None:
        pass

    def register(self, _donor_id: str, _prompt: Prompt) -> None:
        pass

    def propose(self, _prompt: Prompt) -> Proposal:
        return Proposal(reason="disabled")


class BlockHashPlanner:
    """Finds full blocks by content. Both sides use the grid, so a block must have the same offset within it."""

    def __init__(self, options: PlannerOptions) -> None:
        self._size = options.block_size
        self._places: dict[int, tuple[str, int]] = {}

    def register(self, donor_id: str, prompt: Prompt) -> None:
        for at, block in enumerate(hash_content(prompt.token_ids, self._size).tolist()):
            self._places.setdefault(block, (donor_id, at * self._size))

    def propose(self, prompt: Prompt) -> Proposal:
        found = [
            Span(*self._places[block], at * self._size, self._size)
            for at, block in enumerate(hash_content(prompt.token_ids, self._size).tolist())
            if block in self._places
        ]
        return Proposal(tuple(found), reason=None if found else "nothing_shared")


class LmcachePlanner:
    """Cuts donors into chunks of 256 tokens and finds them at any offset of a prompt, from left to right."""

    def __init__(self, options: PlannerOptions) -> None:
        self._size = options.chunk_size
        self._places: dict[int, tuple[str, int]] = {}
        self._known = np.empty(0, dtype=np.uint64)

    def register(self, donor_id: str, prompt: Prompt) -> None:
        for at, chunk in enumerate(hash_content(prompt.token_ids, self._size).tolist()):
            self._places.setdefault(chunk, (donor_id, at * self._size))

    def propose(self, prompt: Prompt) -> Proposal:
        if len(self._known) != len(self._places):
            self._known = np.sort(np.fromiter(self._places, dtype=np.uint64, count=len(self._places)))
        rolled = hash_every_offset(prompt.token_ids, self._size)
        if not len(self._known) or not len(rolled):
            return Proposal(reason="nothing_shared")
        places = np.minimum(np.searchsorted(self._known, rolled), len(self._known) - 1)
        spans, free = [], 0
        for start in np.flatnonzero(self._known[places] == rolled).tolist():
            if start >= free:
                spans.append(Span(*self._places[int(rolled[start])], start, self._size))
                free = start + self._size
        return Proposal(tuple(spans), reason=None if spans else "nothing_shared")


def _refuse_eviction(eviction: Any) -> None:
    """Stop the run: without the evicted donor, the planner would look worse than it is."""
    raise InputError(
        f"the planner has no room for all donors: {eviction.donor.donor_id} was evicted", hint="use fewer items"
    )


def make_planner_factory(name: str, options: PlannerOptions) -> Callable[[], ReusePlanner]:
    """Return a function that makes planners of that name."""
    built_in: dict[str, Callable[[PlannerOptions], ReusePlanner]] = {
        "ours": SemblendPlanner,
        "none": NullPlanner,
        "block-hash": BlockHashPlanner,
        "lmcache-chunks": LmcachePlanner,
    }
    if name in built_in:
        return lambda: built_in[name](options)
    made = _load_class(name)
    return lambda: made(options)


def _load_class(name: str) -> Callable[[PlannerOptions], ReusePlanner]:
    module, _, attribute = name.partition(":")
    hint = f"one of {', '.join(BUILT_IN)}, or module:Class"
    if not module or not attribute:
        raise InputError(f"no planner {name!r}", hint=hint)
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise InputError(
            f"planner {name}: {error}", hint="install the module, or add its folder with --semblend-path"
        ) from None
    except AttributeError:
        raise InputError(f"planner {name}: module {module} has no {attribute}", hint=hint) from None
    for method in ("register", "propose"):
        if not callable(getattr(found, method, None)):
            raise InputError(f"planner {name} has no method {method}", hint="see docs/guides/benchmark.md")
    made: Callable[[PlannerOptions], ReusePlanner] = found
    return made


def _keep_best_donor(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    held: dict[str, int] = {}
    for span in spans:
        held[span.donor_id] = held.get(span.donor_id, 0) + span.length
    best = max(held, key=lambda donor_id: held[donor_id], default="")
    return tuple(span for span in spans if span.donor_id == best)
