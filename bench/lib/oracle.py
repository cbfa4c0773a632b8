"""The truth that the benchmarks score against: which tokens lie in a run that some donor holds too.

It shares nothing with the library: every window of 32 tokens of every donor is hashed, the hashes are sorted, and
each hit is then compared token by token. Equal windows have equal hashes, so nothing is missed; unequal windows
never pass the comparison, so nothing is invented. No sampling, no minimum distance, no cap on repeated text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]

WINDOW = 32
_BASE = 0x9E3779B97F4A7C15 | 1
_MASK = (1 << 64) - 1


def window_hashes(tokens: Tokens, window: int = WINDOW) -> Hashes:
    """A 64-bit polynomial hash of every window, by doubling: hash(2n) = hash(n) * base**n + the next hash(n)."""
    if len(tokens) < window:
        return np.empty(0, np.uint64)
    power_hash, power, size = _mixed(tokens), _BASE, 1
    result: Hashes | None = None
    covered = 0
    remaining = window
    while remaining:
        if remaining & 1:
            # Windows of `covered` tokens are done; put the next `size` tokens behind them.
            if result is None:
                result = power_hash
            else:
                count = len(tokens) - covered - size + 1
                result = result[:count] * np.uint64(power) + power_hash[covered : covered + count]
            covered += size
        remaining >>= 1
        if remaining:
            power_hash = power_hash[:-size] * np.uint64(power) + power_hash[size:]
            power, size = power * power & _MASK, size * 2
    assert result is not None
    return result


class SharedRuns:
    """All windows of all donors, ready to be asked about any prompt."""

    def __init__(self, donors: Sequence[Tokens], window: int = WINDOW) -> None:
        self.window = window
        self.tokens = np.concatenate([np.asarray(d, np.int32) for d in donors] or [np.empty(0, np.int32)])
        hashes, starts, base = [], [], 0
        for donor in donors:  # hashed one by one: a window across two donors is nobody's run
            own = window_hashes(np.asarray(donor, np.int32), window)
            hashes.append(own)
            starts.append(np.arange(base, base + len(own), dtype=np.int64))
            base += len(donor)
        all_hashes = np.concatenate(hashes or [np.empty(0, np.uint64)])
        all_starts = np.concatenate(starts or [np.empty(0, np.int64)])
        order = np.argsort(all_hashes, kind="stable")
        self._hashes, self._starts = all_hashes[order], all_starts[order]

    def windows(self, prompt: Tokens) -> Mask:
        """For every window of the prompt: does a donor hold the same tokens in a row?"""
        prompt = np.asarray(prompt, np.int32)
        wanted = window_hashes(prompt, self.window)
        low = np.searchsorted(self._hashes, wanted, side="left")
        held = np.zeros(len(wanted), bool)
        inside = low < len(self._hashes)
        held[inside] = self._hashes[low[inside]] == wanted[inside]
        for chunk in _chunks(np.flatnonzero(held), 65_536):
            held[chunk] = self._same_tokens(prompt, chunk, low[chunk])
        return held

    def covered(self, prompt: Tokens) -> Mask:
        """For every token of the prompt: does it lie in a shared run of at least ``window`` tokens?"""
        return spread_windows(self.windows(prompt), len(prompt), self.window)

    def _same_tokens(self, prompt: Tokens, at: npt.NDArray[np.intp], low: npt.NDArray[np.intp]) -> Mask:
        steps = np.arange(self.window)
        mine = prompt[at[:, None] + steps]
        same: Mask = (self.tokens[self._starts[low][:, None] + steps] == mine).all(axis=1)
        for index in np.flatnonzero(~same):  # two different windows under one hash: ask every holder of that hash
            high = int(np.searchsorted(self._hashes, self._hashes[low[index]], side="right"))
            holders = self._starts[low[index] : high]
            same[index] = bool((self.tokens[holders[:, None] + steps] == mine[index]).all(axis=1).any())
        return same


def spread_windows(windows: Mask, tokens: int, window: int = WINDOW) -> Mask:
    """From "a shared window starts here" to "this token lies in one"."""
    change = np.zeros(tokens + 1, np.int64)
    starts = np.flatnonzero(windows)
    np.add.at(change, starts, 1)
    np.add.at(change, starts + window, -1)
    return np.cumsum(change[:-1]) > 0


def _mixed(tokens: Tokens) -> Hashes:
    """Token ids spread over 64 bits, so that small ids and arithmetic runs do not line up under the polynomial."""
    x = tokens.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = x ^ (x >> np.uint64(31))
    return mixed


def _chunks(array: npt.NDArray[np.intp], size: int) -> list[npt.NDArray[np.intp]]:
    return [array[start : start + size] for start in range(0, len(array), size)]
