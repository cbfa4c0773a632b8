from __future__ import annotations

import numpy as np

from semblend.discover.similarity import SketchIndex
from semblend.fingerprint.simhash import make_sketch


def document(seed: int, tokens: int = 2000) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, tokens).astype(np.int32)


def edited(tokens: np.ndarray, every: int) -> np.ndarray:
    changed = tokens.copy()
    changed[::every] = 3
    return changed


def test_a_document_with_edits_all_over_is_found_among_hundreds() -> None:
    index = SketchIndex()
    for key in range(300):
        index.add(key, make_sketch(document(key)))
    ((key, share), *others) = index.search(make_sketch(edited(document(170), every=20)), 5)
    assert key == 170
    assert 0.7 < share < 1.0
    assert all(other < 0.1 for _, other in others)


def test_an_unknown_document_has_no_near_duplicate() -> None:
    index = SketchIndex()
    for key in range(300):
        index.add(key, make_sketch(document(key)))
    assert all(share < 0.1 for _, share in index.search(make_sketch(document(999)), 5))


def test_equal_overlaps_come_in_the_order_of_their_keys() -> None:
    index, same = SketchIndex(), make_sketch(document(1))
    for key in (5, 2, 9):
        index.add(key, same)
    assert index.search(same, 2) == ((2, 1.0), (5, 1.0))


def test_removal_leaves_the_others_findable() -> None:
    index = SketchIndex()
    for key in range(200):
        index.add(key, make_sketch(document(key, 300)))
    for key in range(0, 200, 3):
        assert index.remove(key)
    assert not index.remove(0)
    assert len(index) == 133
    for key in range(200):
        found = dict(index.search(make_sketch(document(key, 300)), 3))
        assert (found.get(key) == 1.0) == bool(key % 3)


def test_adding_a_key_again_replaces_its_sketch() -> None:
    index = SketchIndex()
    index.add(1, make_sketch(document(1)))
    index.add(1, make_sketch(document(2)))
    assert len(index) == 1
    assert index.search(make_sketch(document(1)), 1) == ()
    assert index.search(make_sketch(document(2)), 1) == ((1, 1.0),)
