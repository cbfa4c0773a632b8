"""What the desk knows about a request until it is released, and what it is told about slots. Values and no rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from semblend.config import SemBlendConfig
from semblend.confirm.receipt import Receipt
from semblend.materialize.blend.quality import Blended, Pieces, Rejected
from semblend.plan.reuse_plan import Decline, ReusePlan
from semblend.prompt import Prompt
from semblend.quality import GATED_MODE, choose_quality, find_path

SHORT_TAIL = 128
"""Tokens behind the last span that we compute in mode fast too: a pass of ours runs in any case."""

NEVER = -1
"""The epoch of a decision that is taken again whenever somebody asks."""

MOST_BEGINNINGS = 3
"""How often a load may begin that loses its slots or its prefix to other requests; then the engine computes it."""

WAITS = ("match", "load")
"""Hooks that are called while a request waits."""

Outcome = Blended | Rejected | Decline


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A request in the engine's waiting queue: its prompt, and how much of it a prefix may cover."""

    request_id: str
    prompt: Prompt
    longest_prefix: int
    declined: str = ""
    mode: str | None = None
    opt_out: bool = False
    restarted: bool = False
    """It was retracted after its first token: its receipt is written already."""
    source: Any = None
    """The engine's own object for it: a later request may have the same id."""


@dataclass(frozen=True, slots=True)
class SlotPool:
    """The engine's slots: ``take`` gives so many or None, ``give_back`` frees them. Both work in whole pages."""

    take: Callable[[int], Tensor | None]
    give_back: Callable[[Tensor], None]
    page_tokens: int = 1

    def round_down(self, tokens: int) -> int:
        return tokens // self.page_tokens * self.page_tokens

    def round_up(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens) * self.page_tokens


@dataclass(eq=False)
class LoadRecord:
    """What is known about one request until it is released."""

    request: Waiting
    mode: str
    exact_tokens: int = 0
    epoch: int = NEVER
    decision: ReusePlan | Decline | None = None
    claim_end: int = 0
    ordered: ReusePlan | None = None
    slots: Tensor | None = None  # ours while it loads; the request's once the engine has written them into its row
    is_written: bool = False  # the engine has asked for the slots, to write them into the request's row
    prefix: Tensor | None = None  # slots of the exact prefix that its load was begun with
    begun: int = 0  # how often its load has begun
    pieces: Pieces[Outcome] | None = None
    outcome: Outcome | None = None
    lookup_ms: float | None = None
    receipt: Receipt | None = None
    judged: bool = False  # the memory of earlier loads was asked, and has said `in_vain`
    in_vain: Decline | None = None
    private: bool = False  # nothing of it may be published, exact or not

    @property
    def path(self) -> str:
        """The mode whose passes its quality takes; requests may choose any number, and there are three paths."""
        return find_path(self.mode)

    @property
    def is_gated(self) -> bool:
        """Whether the gate decides about its donor KV."""
        return self.path == GATED_MODE

    @property
    def is_loading(self) -> bool:
        return self.pieces is not None

    @property
    def is_loaded(self) -> bool:
        return isinstance(self.outcome, Blended) and self.slots is not None


def choose_mode(request: Waiting, config: SemBlendConfig) -> str:
    """The quality of a request: its own, its tenant's, or the server's."""
    tenants = config.find_tenant_quality(request.prompt.namespace.tenant)
    return choose_quality(request.mode, tenants, config.quality)
