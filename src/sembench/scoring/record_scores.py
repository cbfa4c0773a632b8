"""Scores a record: its answer against the gold answers and against the cold answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sembench.backends.base import ServerAnswer
from sembench.manifests.cases import Case
from sembench.result import RequestRecord
from sembench.scoring import answers as scoring

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


def score_against_gold(
    text: str, case: Case, threshold: float, f1_floor: float = scoring.QUALITY_F1_FLOOR
) -> dict[str, Any]:
    """Return the quality fields of a record; None if the case has no answers or no planted facts.

    An answer passes if it holds the gold answer's words (recall) and is not mostly something else (F1).
    """
    f1 = scoring.score_best(scoring.compute_token_f1, text, case.answers)
    score = scoring.compute_answer_recall(text, case.answers)
    planted, donor = case.planted_fact, case.donor_fact
    says_planted = None if planted is None else scoring.says(text, planted)
    return {
        "quality_score": score,
        "quality_pass": None if score is None else score >= threshold and (f1 or 0.0) >= f1_floor,
        "quality_f1": f1,
        "quality_rouge_l": scoring.score_best(scoring.compute_rouge_l, text, case.answers),
        "exact_match": scoring.score_best(scoring.compute_exact_match, text, case.answers),
        "edit_similarity": scoring.score_best(scoring.compute_edit_similarity, text, case.answers),
        "planted_fact_answered": says_planted,
        "donor_fact_answered": None if donor is None else scoring.says(text, donor) and not says_planted,
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
    divergence = scoring.find_first_divergence(cold.units, warm.units)
    return replace(
        record,
        cold_f1=scoring.compute_token_f1(warm.text, cold.text),
        cold_rouge_l=scoring.compute_rouge_l(warm.text, cold.text),
        cold_kl_topk=scoring.compute_kl_topk(cold.top_logprobs, warm.top_logprobs, divergence),
        first_divergence=divergence,
        ppl_ratio=scoring.compute_ppl_ratio(cold.token_logprobs, warm.token_logprobs, divergence),
    )
