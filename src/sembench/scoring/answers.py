"""Scores of answers: against the gold answers and against the cold answer."""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sembench.backends import ServerAnswer
from sembench.manifests.cases import Case
from sembench.result import RequestRecord

# -- texts -----------------------------------------------------------------------------------------------------------
# Every score lies in [0, 1] and higher is better, except KL (nats, 0 is equal), the first divergence (a position)
# and the perplexity ratio (1 is equal). None means that there was nothing to compare, which is not zero.

QUALITY_THRESHOLD = 0.60
QUALITY_F1_FLOOR = 0.10
"""An answer that passes has at least this F1: one that repeats the whole prompt holds every gold answer, too."""

_ARTICLES = frozenset({"a", "an", "the"})
_STOP_WORDS = (
    _ARTICLES
    | frozenset(
        ("and", "or", "of", "to", "in", "on", "at", "by", "for", "with", "from", "as", "is", "are", "was", "were", "be")
    )
    | frozenset(("been", "it", "its", "this", "that", "these", "those"))
)
# Scripts without spaces are split by character; otherwise a whole sentence would be one word.
_WORD = re.compile(r"[぀-ヿ㐀-䶿一-鿿가-힣]|[^\W_぀-ヿ㐀-䶿一-鿿가-힣]+")
_SUFFIXES = ("ingly", "edly", "ing", "ies", "ed", "es", "ly", "s")
_SHORTEST_STEM = 3

TopLogprobs = Sequence[Mapping[str, float]]


def split_words(text: str) -> list[str]:
    """Return lower-cased words without punctuation and articles.

    >>> split_words("The Ferry, at 9:30!")
    ['ferry', 'at', '9', '30']
    """
    plain = unicodedata.normalize("NFKC", text).casefold()
    return [word for word in _WORD.findall(plain) if word not in _ARTICLES]


def compute_token_f1(prediction: str, reference: str) -> float:
    """Return the harmonic mean of precision and recall over words, each counted as often as it occurs.

    >>> round(compute_token_f1("at nine sharp", "nine"), 2)
    0.5
    """
    return _compute_f1(split_words(prediction), split_words(reference))


def compute_exact_match(prediction: str, reference: str) -> float:
    """Return 1.0 if both have the same words in the same order, else 0.0."""
    return float(split_words(prediction) == split_words(reference))


def compute_rouge_l(prediction: str, reference: str) -> float:
    """Return the F-measure of the longest common subsequence of words.

    >>> compute_rouge_l("the ferry leaves at nine", "ferry leaves at nine")
    1.0
    """
    said, wanted = split_words(prediction), split_words(reference)
    if not said or not wanted:
        return float(said == wanted)
    common = _measure_common_subsequence(said, wanted)
    return 2 * common / (len(said) + len(wanted))


def compute_edit_similarity(prediction: str, reference: str) -> float:
    """Return 1 - Levenshtein distance / longer length, over characters: the measure for code.

    >>> compute_edit_similarity("return x", "return y")
    0.875
    """
    if not prediction and not reference:
        return 1.0
    return 1.0 - _compute_levenshtein(prediction, reference) / max(len(prediction), len(reference))


def compute_answer_recall(prediction: str, answers: Sequence[str]) -> float | None:
    """Return the largest share of a gold answer's words that the prediction contains; words are stemmed.

    >>> compute_answer_recall("It was registered in Bergen.", ["registering in Bergen", "Oslo"])
    1.0
    """
    said = Counter(_stem(word) for word in split_words(prediction))
    best: float | None = None
    for answer in answers:
        wanted = Counter(_stem(word) for word in _select_content_words(answer))
        if not wanted:
            continue
        share = sum((said & wanted).values()) / sum(wanted.values())
        best = share if best is None else max(best, share)
    return best


def score_best(score: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float | None:
    """Return the best score against any gold answer; None if there is none."""
    return max((score(prediction, answer) for answer in answers), default=None)


def says(text: str, fact: str) -> bool:
    """Return whether the words of ``fact`` stand in ``text`` one after the other.

    >>> says("The code is KX-42, sir", "kx 42"), says("KX-421", "KX-42")
    (True, False)
    """
    wanted, said = split_words(fact), split_words(text)
    return bool(wanted) and any(
        said[start : start + len(wanted)] == wanted for start in range(len(said) - len(wanted) + 1)
    )


def find_first_divergence(cold: Sequence[object], warm: Sequence[object]) -> int | None:
    """Return the position of the first token that differs; None if both are equal to the end.

    >>> find_first_divergence([1, 2, 3], [1, 2, 4]), find_first_divergence([1], [1, 2]), find_first_divergence([1], [1])
    (2, 1, None)
    """
    for position, (left, right) in enumerate(zip(cold, warm, strict=False)):
        if left != right:
            return position
    return None if len(cold) == len(warm) else min(len(cold), len(warm))


def compute_kl_topk(cold: TopLogprobs, warm: TopLogprobs, same_until: int | None = None) -> float | None:
    """Return the mean KL(cold || warm) in nats over the positions where both had the same context.

    Only the likeliest tokens are known; what is left of the mass counts as one further token, so the value is a lower
    bound. Positions behind ``same_until`` (the first differing token) continue different texts and say nothing.
    """
    count = min(len(cold), len(warm))
    if same_until is not None:
        count = min(count, same_until + 1)
    parts = [_compute_kl(cold[at], warm[at]) for at in range(count) if cold[at] and warm[at]]
    return float(np.mean(parts)) if parts else None


def compute_ppl_ratio(cold: Sequence[float], warm: Sequence[float], same_until: int | None = None) -> float | None:
    """Return the perplexity of the warm answer over that of the cold one, on the tokens that both have.

    >>> round(compute_ppl_ratio([-1.0, -1.0], [-1.5, -1.5]), 3)
    1.649
    """
    count = min(len(cold), len(warm)) if same_until is None else min(len(cold), len(warm), same_until)
    if count == 0:
        return None
    return math.exp(min(float(np.mean(cold[:count])) - float(np.mean(warm[:count])), 700.0))


def _compute_f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    if not said or not wanted:
        return float(list(said) == list(wanted))
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted))


def _select_content_words(text: str) -> list[str]:
    """Return the words without stop words; an answer of stop words alone keeps them."""
    found = split_words(text)
    return [word for word in found if word not in _STOP_WORDS] or found


def _stem(word: str) -> str:
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= _SHORTEST_STEM:
            return word[: -len(suffix)]
    return word[:-1] if word.endswith("e") and len(word) > _SHORTEST_STEM + 1 else word


def _measure_common_subsequence(left: Sequence[str], right: Sequence[str]) -> int:
    """Return the length of the longest common subsequence; one integer holds a row of bits."""
    places: dict[str, int] = {}
    for at, word in enumerate(left):
        places[word] = places.get(word, 0) | 1 << at
    row, full = 0, (1 << len(left)) - 1
    for word in right:
        union = row | places.get(word, 0)
        shifted = row << 1 | 1
        row = union & ~(union - shifted) & full
    return row.bit_count()


def _compute_levenshtein(left: str, right: str) -> int:
    if len(left) < len(right):
        left, right = right, left
    previous = np.arange(len(right) + 1)
    codes = np.frombuffer(right.encode("utf-32-le"), dtype=np.uint32)
    steps = np.arange(len(right) + 1)
    for at, character in enumerate(left, start=1):
        replaced = previous[:-1] + (codes != ord(character))
        current = np.concatenate(([at], np.minimum(replaced, previous[1:] + 1)))
        # insertions run along the row: a running minimum of value - position, position added back
        previous = np.minimum.accumulate(current - steps) + steps
    return int(previous[-1])


def _compute_kl(cold: Mapping[str, float], warm: Mapping[str, float]) -> float:
    floor = 1e-9
    rest_cold = max(1.0 - sum(math.exp(value) for value in cold.values()), 0.0)
    shared = {token: math.exp(warm[token]) for token in cold if token in warm}
    rest_warm = max(1.0 - sum(math.exp(value) for value in warm.values()), floor)
    # A token that is not in warm's list is at most as likely as the last one in it, and as the rest of the mass.
    unknown = min(min((math.exp(value) for value in warm.values()), default=floor), rest_warm)
    total, rest = 0.0, max(1.0 - sum(shared.values()), floor)
    for token, value in cold.items():
        share = math.exp(value)
        other = shared.get(token)
        if other is None:
            other = max(unknown, floor)
            rest = max(rest - other, floor)
        total += share * (value - math.log(max(other, floor)))
    if rest_cold > floor:
        total += rest_cold * (math.log(rest_cold) - math.log(rest))
    return max(total, 0.0)


# -- records ---------------------------------------------------------------------------------------------------------

ECHO_WORDS = 8
"""Fewer words at the beginning of a prompt may be the beginning of an honest answer, too."""


@dataclass(frozen=True, slots=True)
class ComparableAnswer:
    """The parts of an answer that are compared; it comes from a server or from a result file."""

    text: str
    units: Sequence[object]
    token_logprobs: Sequence[float] = ()
    top_logprobs: Sequence[Mapping[str, float]] = ()

    @classmethod
    def from_answer(cls, answer: ServerAnswer) -> ComparableAnswer:
        return cls(answer.text, answer.output_units, answer.token_logprobs, answer.top_logprobs)

    @classmethod
    def from_record(cls, record: RequestRecord) -> ComparableAnswer:
        """Take the answer from a result file, which keeps at most 2000 characters of each."""
        text = record.output_text or ""
        top = record.output_top_logprobs
        top = [one for one in top if isinstance(one, dict)] if isinstance(top, list) else []
        return cls(text, record.output_token_ids or tuple(text.split()), (), top)


def score_against_gold(text: str, case: Case, threshold: float, f1_floor: float = QUALITY_F1_FLOOR) -> dict[str, Any]:
    """Return the quality fields of a record; None if the case has no answers or no planted facts.

    An answer passes if it holds the gold answer's words (recall) and is not mostly something else (F1).
    """
    f1 = score_best(compute_token_f1, text, case.answers)
    score = compute_answer_recall(text, case.answers)
    planted, donor = case.planted_fact, case.donor_fact
    says_planted = None if planted is None else says(text, planted)
    return {
        "quality_score": score,
        "quality_pass": None if score is None else score >= threshold and (f1 or 0.0) >= f1_floor,
        "quality_f1": f1,
        "quality_rouge_l": score_best(compute_rouge_l, text, case.answers),
        "exact_match": score_best(compute_exact_match, text, case.answers),
        "edit_similarity": score_best(compute_edit_similarity, text, case.answers),
        "planted_fact_answered": says_planted,
        "donor_fact_answered": None if donor is None else says(text, donor) and not says_planted,
    }


def repeats_prompt(answer: str, prompt: str) -> bool | None:
    """Return whether an answer is the beginning of its prompt; None if it is too short to tell.

    >>> repeats_prompt("one two three four five six seven eight", "one two three four five six seven eight nine")
    True
    """
    said = answer.split()
    if len(said) < ECHO_WORDS:
        return None
    asked = prompt.split()
    shared = min(len(said), len(asked))
    return said[:shared] == asked[:shared]


def score_against_cold(record: RequestRecord, warm: ComparableAnswer, cold: ComparableAnswer) -> RequestRecord:
    """Return the record of the warm answer with its distance from the cold one."""
    divergence = find_first_divergence(cold.units, warm.units)
    return replace(
        record,
        cold_f1=compute_token_f1(warm.text, cold.text),
        cold_rouge_l=compute_rouge_l(warm.text, cold.text),
        cold_kl_topk=compute_kl_topk(cold.top_logprobs, warm.top_logprobs, divergence),
        first_divergence=divergence,
        ppl_ratio=compute_ppl_ratio(cold.token_logprobs, warm.token_logprobs, divergence),
    )
