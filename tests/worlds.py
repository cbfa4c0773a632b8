"""Small worlds for tests: stores filled with prompts, and plain oracles that need no index."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from semblend import Decline, Prompt, ReusePlan, SemBlend
from semblend.prompt import TokenArray


def tokens(seed: int, count: int, vocabulary: int = 50_000) -> TokenArray:
    return np.random.default_rng(seed).integers(0, vocabulary, count).astype(np.int32)


def join(*parts: Iterable[int]) -> TokenArray:
    return np.concatenate([np.asarray(list(part), np.int32) for part in parts])


def spans_of(decision: ReusePlan | Decline) -> tuple:
    return decision.spans if isinstance(decision, ReusePlan) else ()


def covered(decision: ReusePlan | Decline, size: int) -> np.ndarray:
    """Which target positions the plan's spans hold."""
    mask = np.zeros(size, bool)
    for span in spans_of(decision):
        assert not mask[span.target_start : span.target_end].any(), "spans overlap"
        mask[span.target_start : span.target_end] = True
    return mask


def in_shared_runs(target: TokenArray, donors: Iterable[TokenArray], shortest: int) -> np.ndarray:
    """Which target positions lie in a run of ``shortest`` tokens that some donor also has: every window in a set."""
    known = {donor[i : i + shortest].tobytes() for donor in donors for i in range(len(donor) - shortest + 1)}
    mask = np.zeros(len(target), bool)
    for i in range(len(target) - shortest + 1):
        if target[i : i + shortest].tobytes() in known:
            mask[i : i + shortest] = True
    return mask


def assert_token_equal(sb: SemBlend, prompt: Prompt, decision: ReusePlan | Decline) -> None:
    end = 0
    for span in spans_of(decision):
        donor = sb.donor_tokens(span.donor_id)
        assert donor is not None
        assert span.target_start >= end
        assert np.array_equal(
            prompt.token_ids[span.target_start : span.target_end], donor[span.donor_start : span.donor_end]
        )
        end = span.target_end
