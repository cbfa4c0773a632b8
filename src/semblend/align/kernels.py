"""Compiled alignment: seeds become maximal matches, matches become a cover. Importing imports numba.

The tests hold it to a readable twin, ``tests/plain_align.py``. Limits come as arguments: numba's on-disk cache does
not notice when a constant imported from another module changes.
"""

from __future__ import annotations

import numpy as np

from semblend.discover.kernels import MAX_STEPS, NEXT, OFFSET, SLOT, TAG
from semblend.discover.slots import EXPIRES, LENGTH, NAMESPACE, START
from semblend.fingerprint.kernels import njit

COVERED, LAST_SLOT, LAST_SHIFT, SPENT, MATCHES, EXAMINED = 0, 1, 2, 3, 4, 5


@njit(inline="always")
def _extend_right(tokens, at, donor, donor_at, donor_end):
    """Return the first target position >= at where prompt and donor differ."""
    room = min(len(tokens) - at, donor_end - donor_at)
    i = 0
    while i < room and tokens[at + i] == donor[donor_at + i]:
        i += 1
    return at + i


@njit(inline="always")
def _extend_left(tokens, at, floor, donor, donor_at, donor_begin):
    """Return the smallest target position <= at down to which prompt and donor agree."""
    room = min(at - floor, donor_at - donor_begin)
    i = 0
    while i < room and tokens[at - 1 - i] == donor[donor_at - 1 - i]:
        i += 1
    return at - i


@njit(inline="always")
def _promises(tokens, at, covered, floor, right, left, log, log_at, begin, end):
    """Whether one token shows that a candidate could reach further right, or begin further left in uncovered text.

    This cheap check comes before the full comparison, as in a compressor's match finder.
    """
    reach = right[1]
    beyond = log_at + (reach - at)
    if reach < at or (reach < len(tokens) and beyond < end and tokens[reach] == log[beyond]):
        return True
    if right[2] < 0 or left[0] <= max(covered, floor):
        return False
    before = log_at + (left[0] - 1 - at)
    return before >= begin and tokens[left[0] - 1] == log[before]


@njit()
def _find_best_runs(
    tokens, at, posting, floor, shortest, k, limits, postings, log, slots, namespace_id, now, only, state, right, left,
):  # fmt: skip
    """Extend one seed on the donors that have it; return whether a match reaches beyond what is covered.

    Fills ``right`` with the match that reaches furthest right and ``left`` with the one that begins furthest left.
    """
    max_candidates, _, _, cost_of_a_look = limits
    covered = state[COVERED]
    right[0], right[1], right[2] = len(tokens), covered, -1
    left[0] = len(tokens)
    tag = postings[posting, TAG]
    looked = 0
    steps = 0
    while posting != 0 and looked < max_candidates and steps < MAX_STEPS:
        here = posting
        posting = np.int64(postings[here, NEXT])
        steps += 1
        slot = np.int64(postings[here, SLOT])
        offset = np.int64(postings[here, OFFSET])
        if postings[here, TAG] != tag or slots[slot, NAMESPACE] != namespace_id or slots[slot, EXPIRES] <= now:
            continue
        if only >= 0 and slot != only:
            continue
        if at < covered and slot == state[LAST_SLOT] and at - offset == state[LAST_SHIFT]:
            continue  # the last match itself, which ended at ``covered``
        looked += 1
        state[SPENT] += cost_of_a_look
        begin = slots[slot, START]
        end = begin + slots[slot, LENGTH]
        log_at = begin + offset
        goes_on = right[2] >= 0 and slot == state[LAST_SLOT] and slot != right[2]
        if not (goes_on or _promises(tokens, at, covered, floor, right, left, log, log_at, begin, end)):
            continue
        match_end = _extend_right(tokens, at, log, log_at, end)
        if match_end - at < k:
            continue
        match_start = _extend_left(tokens, at, floor, log, log_at, begin)
        state[SPENT] += match_end - match_start
        if match_end - match_start < shortest:
            continue
        state[EXAMINED] += 1
        level = right[2] >= 0 and match_end == right[1]
        longer = match_start < right[0] or (match_start == right[0] and goes_on)
        if match_end > right[1] or (level and longer):
            right[0], right[1], right[2], right[3] = match_start, match_end, slot, offset - (at - match_start)
        if match_start < left[0]:
            left[0], left[1], left[2], left[3] = match_start, match_end, slot, offset - (at - match_start)
    return right[2] >= 0


@njit(nogil=True)
def extend(
    tokens, positions, first, seed_from, seed_to, floor, shortest, k, guaranteed,
    limits, postings, log, slots, namespace_id, now, only, state, out,
):  # fmt: skip
    """Extend the seeds [seed_from, seed_to) to maximal token-equal matches, into ``out``; with the slot ``only`` alone.

    A match row is (start, end, slot, donor_start). Seeds deeper than ``guaranteed - 1`` tokens inside the last match
    are skipped: a match through such a seed either ends inside the last match or has another seed nearer to its end.
    Two matches of one seed are kept: the one that reaches furthest right, and the one that begins before it, if the
    tokens between them were not covered.
    """
    _, free_work, work_per_token, _ = limits
    right = np.zeros(4, np.int64)
    left = np.zeros(4, np.int64)
    for i in range(seed_from, seed_to):
        posting = np.int64(first[i])
        at = positions[i]
        covered = state[COVERED]
        if posting == 0 or at <= covered - guaranteed or at < floor:
            continue
        if state[SPENT] > free_work + work_per_token * at:
            continue
        found = _find_best_runs(
            tokens, at, posting, floor, shortest, k, limits, postings, log, slots, namespace_id, now, only,
            state, right, left,
        )  # fmt: skip
        if not found:
            continue
        if left[0] < right[0] and right[0] > covered:
            out[state[MATCHES]] = left
            state[MATCHES] += 1
        out[state[MATCHES]] = right
        state[MATCHES] += 1
        state[COVERED], state[LAST_SLOT], state[LAST_SHIFT] = right[1], right[2], right[0] - right[3]


@njit(nogil=True)
def drop_dominated(found):
    """Return matches in target order without those inside another; of equal ones the first found stays."""
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


@njit(nogil=True)
def choose_cover(matches, shortest, seam, look_back):
    """Choose pieces of matches that do not overlap and hold most tokens, less ``seam`` for every piece.

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


@njit(nogil=True)
def find_first_unequal(tokens, pieces, log, slots):
    """Return the index of the first piece whose tokens are not the donor's, -1 if all are equal."""
    for i in range(len(pieces)):
        at = slots[pieces[i, 2], START] + pieces[i, 3] - pieces[i, 0]
        for t in range(pieces[i, 0], pieces[i, 1]):
            if tokens[t] != log[at + t]:
                return i
    return -1


@njit(inline="always")
def _resync(tokens, at, room, log, log_at, log_room, step, shortest, max_edit):
    """Find the nearest (skipped in prompt, skipped in donor, run) after which at least ``shortest`` tokens agree.

    To the right (``step`` 1) or to the left (-1); a run of 0 when there is none.
    """
    for skipped in range(1, 2 * max_edit + 1):
        for ahead in range(max(0, skipped - max_edit), min(skipped, max_edit) + 1):
            behind = skipped - ahead
            longest = min(room - ahead, log_room - behind)
            run = 0
            while run < longest and tokens[at + step * (ahead + run)] == log[log_at + step * (behind + run)]:
                run += 1
            if run >= shortest:
                return ahead, behind, run
    return 0, 0, 0


@njit(nogil=True)
def bridge(tokens, pieces, log, slots, shortest, floor, max_edit):
    """Return the pieces with the short runs between and beside them, which no seed guarantees.

    From the end of a piece we look a few tokens ahead in prompt and donor for the place where they agree again, as a
    genome aligner does between its anchors.
    """
    out = np.empty((len(pieces) + len(tokens) // shortest + 1, 4), np.int64)
    count = 0
    for i in range(len(pieces)):
        start, stop, slot, donor_start = pieces[i]
        begin, length = slots[slot, START], slots[slot, LENGTH]
        first = count
        at, donor_at = start - 1, donor_start - 1
        while True:
            ahead, behind, run = _resync(
                tokens, at, at + 1 - floor, log, begin + donor_at, donor_at + 1, -1, shortest, max_edit
            )
            if run == 0:
                break
            at, donor_at = at - ahead - run, donor_at - behind - run
            out[count, 0], out[count, 1], out[count, 2], out[count, 3] = at + 1, at + 1 + run, slot, donor_at + 1
            count += 1
        out[first:count] = out[first:count][::-1].copy()
        out[count] = pieces[i]
        count += 1
        limit = pieces[i + 1, 0] if i + 1 < len(pieces) else len(tokens)
        at, donor_at = stop, donor_start + stop - start
        while True:
            ahead, behind, run = _resync(
                tokens, at, limit - at, log, begin + donor_at, length - donor_at, 1, shortest, max_edit
            )
            if run == 0:
                break
            at, donor_at = at + ahead, donor_at + behind
            out[count, 0], out[count, 1], out[count, 2], out[count, 3] = at, at + run, slot, donor_at
            count += 1
            at, donor_at = at + run, donor_at + run
        floor = out[count - 1, 1]
    return out[:count]
