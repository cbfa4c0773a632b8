"""The settings of a live run."""

from __future__ import annotations

from dataclasses import dataclass

from semblend.errors import InputError

PAIRED_ARMS = ("cold", "warm", "rerun")
COLD_ARMS = frozenset({"cold", "rerun"})
ISOLATIONS = ("flush", "salt", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """The settings of a live run. ``isolation`` is how a case gets an empty cache: flush, salt or none.

    ``top_logprobs`` None asks for none. After ``tenant`` primed a prompt, ``other_tenant`` asks the same prompt, for
    ``tenant_pairs`` cases: nothing of it may be reused.
    """

    arms: tuple[str, ...] = ("single",)
    isolation: str = "salt"
    donor_tokens: int = 1
    recipient_tokens: int = 16
    post_donor_delay_ms: float = 0.0
    cooldown_ms: float = 0.0
    warmup_requests: int = 0
    block_size: int = 16
    top_logprobs: int | None = None
    quality_threshold: float = 0.60
    quality_f1_floor: float = 0.10
    tenant: str = ""
    template: str = ""
    tenant_pairs: int = 0
    other_tenant: str = "tenant-b"
    tenant_salt: bool = False
    reuse: bool = True
    concurrency: int = 1
    min_donor_gap_requests: int = 0
    seed: int = 0
    max_items: int | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise InputError(f"--concurrency {self.concurrency} runs nothing", hint="1 or more")
        if self.together and self.isolation == "flush":
            raise InputError(
                "a flush empties the cache of every case that is under way",
                hint="leave --concurrency at 1, or use salts",
            )
        if self.together and len(self.arms) > 1:
            raise InputError("paired arms are timed one after the other", hint="leave --concurrency at 1")

    @property
    def together(self) -> bool:
        """Whether several cases run at the same time; counters cannot tell them apart then."""
        return self.concurrency > 1 or self.min_donor_gap_requests > 0
