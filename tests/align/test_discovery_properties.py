"""What must hold for every store and every prompt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_align import align_plainly
from worlds import assert_token_equal, covered, in_shared_runs, spans_of

from semblend import Decline, Namespace, Prompt, ReusePlan, SemBlend, SemBlendConfig
from semblend.align.aligner import Aligner
from semblend.discover.store import DonorStore
from semblend.fingerprint.fingerprinter import Fingerprinter
from semblend.fingerprint.hashes import DEFAULT_SCHEME, HashScheme
from semblend.prompt import TokenArray

CONFIG = SemBlendConfig(embedder="none", metrics=False, max_bytes=1 << 22)


@st.composite
def worlds(
    draw: st.DrawFn, vocabularies: tuple[int, ...] = (1, 2, 5, 50, 50_000)
) -> tuple[list[TokenArray], TokenArray]:
    """Donors and a prompt spliced from the same few texts, with noise between the pieces."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    vocabulary = draw(st.sampled_from(vocabularies))
    texts = [rng.integers(0, vocabulary, int(rng.integers(20, 300))) for _ in range(4)]

    def spliced() -> TokenArray:
        parts = [rng.integers(0, vocabulary, int(rng.integers(1, 8)))]
        for _ in range(int(rng.integers(1, 6))):
            text = texts[int(rng.integers(len(texts)))]
            start = int(rng.integers(len(text)))
            parts += [
                text[start : int(rng.integers(start, len(text) + 1))],
                rng.integers(0, vocabulary, rng.integers(8)),
            ]
        return np.concatenate(parts).astype(np.int32)

    return [spliced() for _ in range(int(rng.integers(1, 8)))], spliced()


def store_of(donors: list[TokenArray], config: SemBlendConfig = CONFIG, **options: object) -> SemBlend:
    sb = SemBlend(config, **options)  # type: ignore[arg-type]
    for i, donor in enumerate(donors):
        sb.register(Prompt(donor), donor_id=str(i))
    return sb


@given(worlds())
@settings(max_examples=100)
def test_every_returned_span_is_token_equal_long_enough_and_in_order(world):
    donors, target = world
    sb = store_of(donors)
    decision = sb.lookup(Prompt(target))
    assert_token_equal(sb, Prompt(target), decision)
    assert all(span.length >= 32 for span in spans_of(decision))


@given(worlds(vocabularies=(50, 50_000)))
@settings(max_examples=100)
def test_no_32_tokens_of_a_shared_run_stay_uncovered(world):
    donors, target = world
    mask = covered(store_of(donors).lookup(Prompt(target)), len(target))
    for donor in donors:
        missed = in_shared_runs(target, [donor], 32) & ~mask
        streak = longest = 0
        for lost in missed:
            streak = streak + 1 if lost else 0
            longest = max(longest, streak)
        assert longest < 32


@given(st.integers(0, 2**32), st.integers(32, 600), st.integers(0, 500), st.integers(0, 500))
@settings(max_examples=100)
def test_one_shared_run_is_found_whole_at_any_offset(seed, length, before, after):
    rng = np.random.default_rng(seed)
    run = rng.integers(0, 50_000, length)
    donor = np.concatenate([rng.integers(50_000, 60_000, after), run, rng.integers(60_000, 70_000, before)])
    target = np.concatenate([rng.integers(70_000, 80_000, before), run, rng.integers(80_000, 90_000, after)])
    plan = store_of([donor]).lookup(Prompt(target))
    assert isinstance(plan, ReusePlan)
    assert [(s.donor_start, s.target_start, s.length) for s in plan.spans] == [(after, before, length)]


@given(worlds(vocabularies=(50_000,)))
@settings(max_examples=100)
def test_a_prompt_that_shares_nothing_reuses_nothing(world):
    donors, target = world
    assert isinstance(store_of(donors).lookup(Prompt(target + 50_000)), Decline)


@given(worlds())
@settings(max_examples=150)
def test_a_forced_hash_collision_is_caught_by_the_token_check(world):
    """With base 0 a k-gram's hash is that of its last token: almost every seed collides with a wrong one."""
    donors, target = world
    sb = store_of(donors, scheme=HashScheme(base=0))
    decision = sb.lookup(Prompt(target))
    assert not (isinstance(decision, Decline) and decision.reason == "error")
    assert_token_equal(sb, Prompt(target), decision)


@given(worlds(), st.sampled_from((8, 16, 24, 32, 64)), st.floats(0, 1))
@settings(max_examples=100)
def test_the_compiled_and_the_plain_path_agree(world, min_span_tokens, held):
    donors, target = world
    exact_tokens = int(held * len(target)) if held > 0.5 else 0
    store, fingerprinter = DonorStore(max_donors=100, max_bytes=1 << 22), Fingerprinter()
    for number, donor in enumerate(donors):
        store.add(Prompt(donor), fingerprinter.fingerprint(Prompt(donor)), str(number))
    prompt = Prompt(target)
    candidates = store.find_candidates(fingerprinter.fingerprint(prompt), within=prompt.namespace)
    compiled = Aligner(store, DEFAULT_SCHEME, min_span_tokens=min_span_tokens)
    spans = compiled.align(prompt, candidates, exact_tokens=exact_tokens).spans
    plain = align_plainly(store, DEFAULT_SCHEME, prompt.token_ids, candidates, min_span_tokens, exact_tokens)
    found = [(span.target_start, span.target_end, int(span.donor_id), span.donor_start) for span in spans]
    assert found == [(start, end, int(store.get_at(slot).donor_id), at) for start, end, slot, at in plain]


FIELDS = ("tenant", "model", "revision", "tokenizer", "adapter", "rope", "kv_dtype", "salt")


@pytest.mark.parametrize("field", FIELDS)
@given(ours=st.text(max_size=8), theirs=st.text(max_size=8))
@settings(max_examples=25)
def test_namespaces_that_differ_in_one_field_never_see_each_other(field, ours, theirs):
    tokens = np.arange(500)
    sb = SemBlend(CONFIG)
    sb.register(Prompt(tokens, namespace=Namespace(**{field: theirs})), donor_id="theirs")
    decision = sb.lookup(Prompt(tokens, namespace=Namespace(**{field: ours})))
    assert isinstance(decision, ReusePlan) == (ours == theirs)


def test_a_lookup_without_a_namespace_sees_only_donors_without_one(sb):
    tokens = np.arange(500)
    sb.register(Prompt(tokens, namespace=Namespace(tenant="a")), donor_id="a")
    assert isinstance(sb.lookup(Prompt(tokens)), Decline)
    sb.register(Prompt(tokens), donor_id="nobody's")
    assert sb.lookup(Prompt(tokens)).donor_ids == ("nobody's",)
    assert sb.lookup(Prompt(tokens, namespace=Namespace(tenant="a"))).donor_ids == ("a",)
