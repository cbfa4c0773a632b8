"""Compiled alignment: seeds become maximal matches, matches become a cover. Importing imports numba.

`semblend.align.exact` and `compose` are the readable twins; the tests hold them equal. Limits come as arguments:
numba's on-disk cache does not notice when a constant imported from another module changes.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from semblend.discover.kernels import MAX_STEPS, NEXT, OFFSET, SLOT, TAG
from semblend.discover.slots import EXPIRES, LENGTH, NAMESPACE, START

COVERED, LAST_SLOT, LAST_SHIFT, SPENT, MATCHES, CANDIDATES = 0, 1, 2, 3, 4, 5


@njit(cache=True, inline="always")
def _run_right(tokens, at, donor, donor_at, donor_end):
    """First target position >= at where prompt and donor part."""
    room = min(len(tokens) - at, donor_end - donor_at)
    i = 0
    while i < room and tokens[at + i] == donor[donor_at + i]:
        i += 1
    return at + i


@njit(cache=True, inline="always")
def _run_left(tokens, at, floor, donor, donor_at, donor_begin):
    """Smallest target position <= at down to which prompt and donor agree."""
    room = min(at - floor, donor_at - donor_begin)
    i = 0
    while i < room and tokens[at - 1 - i] == donor[donor_at - 1 - i]:
        i += 1
    return at - i


@njit(cache=True, nogil=True)
def extend(
    tokens, positions, first, seed_from, seed_to, floor, shortest, k, guaranteed,
    limits, postings, log, slots, namespace_id, now, state, out,
):  # fmt: skip
    """Grow seeds [seed_from, seed_to) into maximal token-equal matches.

    A match row is (start, end, slot, donor_start). Seeds that lie deeper than ``guaranteed - 1`` tokens inside what
    the last match covers are passed over: whatever they could show either ends inside that match or has another
    seed nearer to its end. Of one seed's candidates two are kept: the one that reaches furthest right, and the one
    that begins before it and before everything covered so far.
    """
    max_candidates, free_work, work_per_token, cost_of_a_look = limits
    size = len(tokens)
    for i in range(seed_from, seed_to):
        p = np.int64(first[i])
        at = positions[i]
        if p == 0 or at <= state[COVERED] - guaranteed or at < floor:
            continue
        if state[SPENT] > free_work + work_per_token * at:
            continue
        covered = state[COVERED]
        tag = postings[p, TAG]
        right_start, right_end, right_slot, right_donor = size, covered, np.int64(-1), np.int64(0)
        left_start, left_end, left_slot, left_donor = size, np.int64(0), np.int64(-1), np.int64(0)
        looked = 0
        steps = 0
        while p != 0 and looked < max_candidates and steps < MAX_STEPS:
            here = p
            p = np.int64(postings[here, NEXT])
            steps += 1
            if postings[here, TAG] != tag:
                continue
            slot = np.int64(postings[here, SLOT])
            offset = np.int64(postings[here, OFFSET])
            if slots[slot, NAMESPACE] != namespace_id or slots[slot, EXPIRES] <= now:
                continue
            if at < covered and slot == state[LAST_SLOT] and at - offset == state[LAST_SHIFT]:
                continue  # the last match itself, which ended at ``covered``
            looked += 1
            state[SPENT] += cost_of_a_look
            begin = slots[slot, START]
            end = begin + slots[slot, LENGTH]
            here_at = begin + offset
            # Cheap questions first, as in a compressor's match finder: could it reach further right, begin further
            # left in uncovered text, or go on with the donor used last?
            beyond = here_at + (right_end - at)
            reaches = right_end < at or (right_end < size and beyond < end and tokens[right_end] == log[beyond])
            before = here_at + (left_start - 1 - at)
            leads = (
                right_slot >= 0
                and left_start > max(covered, floor)
                and before >= begin
                and tokens[left_start - 1] == log[before]
            )
            goes_on = right_slot >= 0 and slot == state[LAST_SLOT] and slot != right_slot
            if not (reaches or leads or goes_on):
                continue
            match_end = _run_right(tokens, at, log, here_at, end)
            if match_end - at < k:
                continue
            match_start = _run_left(tokens, at, floor, log, here_at, begin)
            state[SPENT] += match_end - match_start
            if match_end - match_start < shortest:
                continue
            state[CANDIDATES] += 1
            donor_start = here_at - (at - match_start) - begin
            better = match_end > right_end or (
                right_slot >= 0
                and match_end == right_end
                and (match_start < right_start or (match_start == right_start and goes_on))
            )
            if better:
                right_start, right_end, right_slot, right_donor = match_start, match_end, slot, donor_start
            if match_start < left_start:
                left_start, left_end, left_slot, left_donor = match_start, match_end, slot, donor_start
        if right_slot < 0:
            continue
        if left_start < right_start and right_start > covered:
            n = state[MATCHES]
            out[n, 0], out[n, 1], out[n, 2], out[n, 3] = left_start, left_end, left_slot, left_donor
            state[MATCHES] = n + 1
        n = state[MATCHES]
        out[n, 0], out[n, 1], out[n, 2], out[n, 3] = right_start, right_end, right_slot, right_donor
        state[MATCHES] = n + 1
        state[COVERED] = right_end
        state[LAST_SLOT] = right_slot
        state[LAST_SHIFT] = right_start - right_donor


@njit(cache=True, nogil=True)
def undominated(found):
    """Matches in target order without those that lie inside another; of equal ones the first found stays."""
    order = np.argsort(found[:, 0] * (1 << 32) - found[:, 1], kind="mergesort")
    kept = np.empty_like(found)
    count = 0
    furthest = np.int64(-1)
    for i in order:
        if found[i, 1] > furthest:
            kept[count] = found[i]
            count += 1
            furthest = found[i, 1]
    return kept[:count]


@njit(cache=True, nogil=True)
def cover(matches, shortest, seam, look_back):
    """Choose non-overlapping pieces of matches that hold most tokens, less ``seam`` for every piece.

    ``matches`` ascend by start and end. Where two chosen matches overlap, the earlier keeps the tokens (more of its
    left context is equal), unless the later one would fall below ``shortest``. Pieces are rows like matches.
    """
    n = len(matches)
    value = np.zeros(n, np.int64)  # best saving of a cover that ends with match i
    begin = np.zeros(n, np.int64)  # where match i begins in that cover
    previous = np.full(n, -1, np.int64)
    leader = np.full(n, -1, np.int64)  # best cover among matches 0..i
    for i in range(n):
        start, end = matches[i, 0], matches[i, 1]
        value[i], begin[i] = end - start - seam, start
        apart = np.searchsorted(matches[:i, 1], start, side="right")  # matches before this one end by its start
        if apart > 0:
            previous[i] = leader[apart - 1]
            value[i] += value[previous[i]]
        for j in range(max(apart, i - look_back), i):
            cut = min(matches[j, 1], end - shortest)
            gained = value[j] + end - matches[j, 1] - seam
            if gained > value[i] and cut - begin[j] >= shortest and cut >= start:
                value[i], begin[i], previous[i] = gained, cut, j
        leader[i] = i if i == 0 or value[i] > value[leader[i - 1]] else leader[i - 1]
    pieces = np.empty_like(matches)
    at = leader[n - 1] if n else -1
    limit = matches[at, 1] if n else 0
    first = n
    while at >= 0:
        first -= 1
        pieces[first, 0], pieces[first, 1], pieces[first, 2] = begin[at], limit, matches[at, 2]
        pieces[first, 3] = matches[at, 3] + begin[at] - matches[at, 0]
        limit = begin[at]
        at = previous[at]
        if at >= 0:
            limit = min(matches[at, 1], limit)
    return pieces[first:]


@njit(cache=True, nogil=True)
def first_unequal(tokens, pieces, log, slots):
    """Index of the first piece whose tokens are not the donor's, -1 when all are equal."""
    for i in range(len(pieces)):
        at = slots[pieces[i, 2], START] + pieces[i, 3] - pieces[i, 0]
        for t in range(pieces[i, 0], pieces[i, 1]):
            if tokens[t] != log[at + t]:
                return i
    return -1
