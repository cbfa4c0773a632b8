"""What may be a prompt, and how a mistake is told."""

from __future__ import annotations

import array
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semblend import InputError, Namespace, NamespaceError, Prompt, SemBlend, SemBlendError, TokenError
from semblend.prompt import LatePrompt

GOOD = {
    "list": [1, 2, 3],
    "tuple": (1, 2, 3),
    "range": range(1, 4),
    "array": array.array("i", [1, 2, 3]),
    "int64": np.array([1, 2, 3], np.int64),
    "uint16": np.array([1, 2, 3], np.uint16),
    "strided": np.array([1, 0, 2, 0, 3, 0])[::2],
}


@pytest.mark.parametrize("given", GOOD.values(), ids=GOOD)
def test_any_flat_sequence_of_integers_is_a_prompt(given):
    prompt = Prompt(given)
    assert prompt.token_ids.dtype == np.int32
    assert prompt.token_ids.tolist() == [1, 2, 3]
    assert prompt == Prompt([1, 2, 3])
    assert hash(prompt) == hash(Prompt([1, 2, 3]))


class Unread(list):
    """A list that nobody reads: its length may be asked for."""

    def __iter__(self):
        raise AssertionError("read")

    __getitem__ = __iter__


def test_a_late_prompt_has_a_length_before_anybody_reads_it_and_equals_the_prompt():
    unread = LatePrompt(Unread([1, 2, 3]), Namespace(tenant="a"))
    assert (len(unread), unread.namespace.tenant) == (3, "a")
    prompt = Prompt([1, 2, 3], namespace=Namespace(tenant="a"))
    late = LatePrompt([1, 2, 3], Namespace(tenant="a"))
    assert late == prompt
    assert hash(late) == hash(prompt)
    assert late.token_ids is late.token_ids, "converted once"
    with pytest.raises(TokenError):
        _ = LatePrompt([1, 0.5], Namespace()).token_ids


BAD = {
    "negative": ([5, -1], "token id -1 at index 1"),
    "too large": ([2**31], "2147483648 at index 0"),
    "far too large": ([1, 2**70], "at index 1"),
    "unsigned 64": (np.array([2**63], np.uint64), "outside"),
    "float": ([1, 0.5], "index 1 is 0.5"),
    "float array": (np.array([1.0, 2.0]), "index 0 is 1.0"),
    "NaN": ([1, math.nan], "index 1 is nan"),
    "string": ("hello", "str"),
    "bytes": (b"hello", "bytes"),
    "string inside": ([1, "two"], "index 1 is 'two'"),
    "None": (None, "NoneType"),
    "None inside": ([1, None], "index 1 is None"),
    "bool": ([True, False], "index 0 is True"),
    "empty": ([], "empty"),
    "nested": ([[1, 2], [3, 4]], "2 dimensions"),
    "ragged": ([[1, 2], [3]], "flat"),
    "scalar": (7, "0 dimensions"),
    "dict": ({1: 2}, "dict"),
    "set": ({1, 2}, "set"),
    "object": (object(), "dimensions"),
}


@pytest.mark.parametrize(("given", "said"), BAD.values(), ids=BAD)
def test_what_is_no_prompt_is_refused_with_the_place_and_a_hint(given, said):
    with pytest.raises(TokenError) as caught:
        Prompt(given)
    assert said in caught.value.message
    assert caught.value.hint
    assert "\n" not in str(caught.value)


@given(st.lists(st.one_of(st.integers(), st.floats(), st.text(max_size=3), st.none()), max_size=8))
def test_every_list_is_a_prompt_or_a_clear_error(given):
    fits = bool(given) and all(type(value) is int and 0 <= value < 2**31 for value in given)
    if fits:
        assert Prompt(given).token_ids.tolist() == given
    else:
        with pytest.raises(TokenError, match="hint:"):
            Prompt(given)


def test_a_prompt_keeps_its_own_read_only_copy():
    ids = np.arange(10, dtype=np.int32)
    prompt = Prompt(ids)
    ids[0] = 99
    assert prompt.token_ids[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        prompt.token_ids[0] = 1


@pytest.mark.parametrize("field", ["tenant", "model", "salt"])
def test_a_namespace_field_that_is_no_string_is_refused(field):
    with pytest.raises(NamespaceError, match=field):
        Namespace(**{field: 7})  # type: ignore[arg-type]


def test_a_namespace_that_is_none_of_ours_is_refused():
    with pytest.raises(NamespaceError):
        Prompt([1], namespace={"tenant": "a"})  # type: ignore[arg-type]


@given(st.tuples(*[st.text(max_size=4)] * 8), st.tuples(*[st.text(max_size=4)] * 8))
def test_different_namespaces_have_different_digests(ours, theirs):
    assert (Namespace(*ours).digest == Namespace(*theirs).digest) == (ours == theirs)
    assert len(Namespace(*ours).digest) == 32


def test_the_digest_does_not_shift_text_between_fields():
    assert Namespace(tenant="ab", model="c").digest != Namespace(tenant="a", model="bc").digest


@pytest.mark.parametrize("wrong", [[1, 2, 3], "text", None])
def test_a_lookup_of_something_else_than_a_prompt_is_an_input_error(wrong):
    sb = SemBlend()
    for call in (sb.lookup, sb.explain, lambda it: sb.register(it, donor_id="a")):
        with pytest.raises(InputError, match="Prompt"):
            call(wrong)


@pytest.mark.parametrize("donor_id", ["", None, 7])
def test_a_donor_needs_a_name(sb, donor_id):
    with pytest.raises(InputError, match="donor id"):
        sb.register(Prompt([1]), donor_id=donor_id)


@pytest.mark.parametrize("exact_tokens", [-1, 11])
def test_exact_tokens_outside_the_prompt_are_an_input_error(sb, exact_tokens):
    with pytest.raises(InputError, match="exact_tokens"):
        sb.lookup(Prompt(range(10)), exact_tokens=exact_tokens)


def test_every_error_of_ours_is_one_family():
    assert issubclass(TokenError, InputError)
    assert issubclass(InputError, SemBlendError)
    assert issubclass(TokenError, ValueError)
