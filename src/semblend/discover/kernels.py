"""Compiled operations on the fingerprint index. Importing this module imports numba.

The index is one hash table with chains, held in flat arrays:

- ``heads[bucket]``: first posting of the bucket's chain, 0 = none (postings are numbered from 1).
- ``postings[p]``: TAG (32 bits of the key), SLOT and OFFSET (which donor, which token), NEXT and PREV in the
  chain, SIBLING (the next posting of the same donor). Newest first, so recent donors are met first.
- ``state``: BUCKETS in use, REACH (the power of two that holds them), FREE (first of the list of freed postings),
  FRESH (first never used), USED.

The table grows by linear hashing: when there are more postings than buckets, one bucket is split. No insert
ever waits for a rehash of the whole table, and memory is touched only as it is needed.
"""

from __future__ import annotations

import numpy as np

from semblend.fingerprint.kernels import mix64, njit

TAG, SLOT, OFFSET, NEXT, PREV, SIBLING = 0, 1, 2, 3, 4, 5
BUCKETS, REACH, FREE, FRESH, USED = 0, 1, 2, 3, 4

FIRST_BUCKETS = 1024
MAX_STEPS = 64  # links followed before a chain is given up


@njit(inline="always")
def _compute_tag(key_hash, namespace_key):
    """Compute the 32-bit tag of a seed in a namespace."""
    return np.uint32(mix64(key_hash ^ namespace_key) & np.uint64(0xFFFFFFFF))


@njit(inline="always")
def _find_bucket(tag, buckets, reach):
    """Find the bucket of a tag by linear hashing: its low bits, one bit fewer if that bucket does not exist yet."""
    bucket = np.int64(tag) & (reach - 1)
    return bucket if bucket < buckets else bucket & ((reach >> 1) - 1)


@njit()
def _split_one(heads, postings, state):
    """Add one bucket and move into it, in order, the postings that belong there."""
    fresh = state[BUCKETS]
    if fresh == state[REACH]:
        state[REACH] *= 2
    reach = state[REACH]
    old = fresh & ((reach >> 1) - 1)
    state[BUCKETS] = fresh + 1
    p = np.int64(heads[old])
    heads[old] = 0
    heads[fresh] = 0
    tail_old = np.int64(0)
    tail_new = np.int64(0)
    while p != 0:
        following = np.int64(postings[p, NEXT])
        moves = (np.int64(postings[p, TAG]) & (reach - 1)) == fresh
        bucket = fresh if moves else old
        tail = tail_new if moves else tail_old
        postings[p, PREV] = tail
        postings[p, NEXT] = 0
        if tail == 0:
            heads[bucket] = p
        else:
            postings[tail, NEXT] = p
        if moves:
            tail_new = p
        else:
            tail_old = p
        p = following


@njit(nogil=True)
def insert(slot, positions, hashes, namespace_key, max_repeats, heads, postings, state, first_of_slot):
    """Add one donor's seeds; return how many postings were made. The caller has checked that they fit."""
    made = 0
    for i in range(len(positions)):
        tag = _compute_tag(hashes[i], namespace_key)
        bucket = _find_bucket(tag, state[BUCKETS], state[REACH])
        head = np.int64(heads[bucket])
        repeats = 0
        p = head
        while p != 0 and np.int64(postings[p, SLOT]) == slot and repeats < max_repeats:
            if postings[p, TAG] == tag:
                repeats += 1
            p = np.int64(postings[p, NEXT])
        if repeats >= max_repeats:
            continue
        p = state[FREE]
        if p != 0:
            state[FREE] = np.int64(postings[p, NEXT])
        else:
            p = state[FRESH]
            state[FRESH] += 1
        postings[p, TAG] = tag
        postings[p, SLOT] = slot
        postings[p, OFFSET] = positions[i]
        postings[p, NEXT] = head
        postings[p, PREV] = 0
        postings[p, SIBLING] = first_of_slot[slot]
        if head != 0:
            postings[head, PREV] = p
        heads[bucket] = p
        first_of_slot[slot] = p
        state[USED] += 1
        made += 1
        if state[USED] > state[BUCKETS] and state[BUCKETS] < len(heads):
            _split_one(heads, postings, state)
    return made


@njit(nogil=True)
def remove(slot, heads, postings, state, first_of_slot):
    """Remove one donor's postings from their chains; the work is proportional to this donor alone."""
    p = np.int64(first_of_slot[slot])
    first_of_slot[slot] = 0
    while p != 0:
        following = np.int64(postings[p, NEXT])
        before = np.int64(postings[p, PREV])
        if before != 0:
            postings[before, NEXT] = following
        else:
            heads[_find_bucket(postings[p, TAG], state[BUCKETS], state[REACH])] = following
        if following != 0:
            postings[following, PREV] = before
        sibling = np.int64(postings[p, SIBLING])
        postings[p, NEXT] = state[FREE]
        state[FREE] = p
        state[USED] -= 1
        p = sibling


@njit(nogil=True)
def probe(hashes, namespace_key, heads, postings, state, first):
    """Find for every seed the newest posting with its tag, into ``first``; 0 if there is none."""
    buckets, reach = state[BUCKETS], state[REACH]
    for i in range(len(hashes)):
        tag = _compute_tag(hashes[i], namespace_key)
        p = np.int64(heads[_find_bucket(tag, buckets, reach)])
        steps = 0
        while p != 0 and postings[p, TAG] != tag:
            p = np.int64(postings[p, NEXT])
            steps += 1
            if steps == MAX_STEPS:
                p = 0
        first[i] = p
