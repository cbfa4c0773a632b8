"""What a leaf of SGLang's tree is worth to our policies; the real tree is in tests/engines/sglang/test_eviction.py."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from semblend.eviction.policy import Lfu
from semblend.integration.sglang.eviction_strategy import BlockChain, PolicyStrategy, find_blocks
from tests.fakes.fake_radix import FakeKey


class Node:
    """What the strategy reads of SGLang's node."""

    def __init__(self, parent: Node | None, tokens: Sequence[int] = (), salt: str | None = None) -> None:
        self.parent, self.key = parent, FakeKey(array("q", tokens), salt)
        self.last_access_time = 0.0

    def split(self, at: int) -> Node:
        """Put a node with the first tokens above this one, as SGLang does where prompts part."""
        tokens = self.key.raw_token_ids()
        above = Node(self.parent, tokens[:at], self.key.extra_key)
        self.parent, self.key = above, FakeKey(tokens[at:], self.key.extra_key)
        return above


def name_all(tokens: Sequence[int], salt: str | None = None) -> list[int]:
    chain = BlockChain(salt, None)
    chain.grow(array("q", tokens))
    return chain.names


@pytest.mark.parametrize("at", [1, 16, 23, 32, 63])
def test_the_blocks_of_a_path_are_those_of_its_tokens_before_and_after_a_split(at):
    leaf = Node(Node(Node(None), range(20), "s"), range(20, 90), "s")
    expected = name_all(range(90), "s")
    assert [*find_blocks(leaf.parent).names, *find_blocks(leaf).names] == expected
    above = leaf.split(at)
    assert [*find_blocks(above.parent).names, *find_blocks(above).names, *find_blocks(leaf).names] == expected
    assert name_all(range(90), "t") != expected


def test_a_chain_that_grows_names_what_a_whole_one_names_and_tells_each_block_once():
    policy, chain = Lfu(), BlockChain(None, None)
    strategy = PolicyStrategy(lambda: policy, list, lambda error: pytest.fail(str(error)))
    for end in (10, 40, 40, 100):
        chain.grow(array("q", range(end)))
        strategy.note_use(chain)
    assert chain.names == name_all(range(100))
    assert policy.price(chain.names) == [1.0] * 6


def test_a_leaf_without_a_block_of_its_own_is_worth_what_stands_in_front_of_it():
    policy, root = Lfu(), Node(None)
    long, short = Node(root, range(64)), Node(root, range(500, 506))
    tail = Node(long, range(900, 905))
    strategy = PolicyStrategy(lambda: policy, lambda: [tail, short], lambda error: pytest.fail(str(error)))
    chain = BlockChain(None, None)
    chain.grow(array("q", range(64)))
    strategy.note_use(chain)
    assert strategy.get_priority(tail) == (1.0, 0.0)
    assert strategy.get_priority(short) == (0.0, 0.0)


def test_a_policy_that_fails_is_dropped_told_once_and_made_anew_for_an_emptied_tree():
    class Broken(Lfu):
        def price(self, keys):
            raise RuntimeError("out of order")

    failures: list[BaseException] = []
    leaves = [Node(Node(None), range(n, n + 32)) for n in range(3)]
    strategy = PolicyStrategy(Broken, lambda: leaves, failures.append)
    for age, leaf in enumerate(leaves):
        leaf.last_access_time = float(age)
    assert [strategy.get_priority(leaf) for leaf in leaves] == [(0.0, 0.0), (0.0, 1.0), (0.0, 2.0)]
    strategy.forget(leaves[0])
    assert [str(error) for error in failures] == ["out of order"]
    strategy.begin_again()
    assert strategy.get_priority(leaves[0]) == (0.0, 0.0)
    assert len(failures) == 2


def test_a_policy_that_cannot_be_made_anew_is_told_and_the_last_use_decides():
    made, told = [Lfu()], []
    strategy = PolicyStrategy(lambda: made.pop(), lambda: [], told.append)
    strategy.begin_again()
    assert [type(error) for error in told] == [IndexError]
    assert strategy.get_priority(Node(Node(None), range(40))) == (0.0, 0.0)
