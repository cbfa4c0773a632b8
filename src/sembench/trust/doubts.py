"""The names of what makes a result unbelievable. A finding is a name and one sentence with the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Doubt(StrEnum):
    """Why a result is not believed, the gravest first; the report keeps this order. `MEANINGS` explains each."""

    TENANT_LEAK = "tenant_leak"
    WRONG_KV = "wrong_kv"
    REUSE_ON_NEGATIVES = "reuse_on_negatives"
    EDITED_RESULT = "edited_result"
    IMPOSSIBLE_NUMBERS = "impossible_numbers"
    MIXED_SERVERS = "mixed_servers"
    FOREIGN_EVIDENCE = "evidence_of_another_run"
    MALFORMED_COUNTS = "malformed_counts"
    CONTRADICTED = "contradicted"
    OVERLONG_ANSWERS = "overlong_answers"
    ECHO = "echo"
    SPEED_WITHOUT_REUSE = "speed_without_reuse"
    HITS_SAVE_NOTHING = "hits_save_nothing"
    ONE_WITNESS = "one_witness"
    ANSWERS_LEFT_COLD = "answers_left_cold"
    NOTHING_CONFIRMED = "nothing_confirmed"
    NOT_PAIRED = "not_paired"
    NO_NEGATIVES = "no_negatives"
    REQUESTS_FAILED = "requests_failed"


MEANINGS: Mapping[Doubt, str] = {
    Doubt.TENANT_LEAK: "One tenant was served another tenant's tokens.",
    Doubt.WRONG_KV: "Only the warm answer states what stands in the donor's text alone.",
    Doubt.REUSE_ON_NEGATIVES: "Reuse was claimed where donor and recipient share nothing.",
    Doubt.EDITED_RESULT: "The file is not what was measured: no requests, no digest, or one that does not fit.",
    Doubt.IMPOSSIBLE_NUMBERS: "A request holds numbers that no request can have.",
    Doubt.MIXED_SERVERS: "The sessions of the run were measured on different servers.",
    Doubt.FOREIGN_EVIDENCE: "An engine log, a manifest or a calibration that does not belong to this run.",
    Doubt.MALFORMED_COUNTS: "The server sent counts that are none, such as NaN.",
    Doubt.CONTRADICTED: "Witnesses contradict each other, or what the prompts make possible.",
    Doubt.OVERLONG_ANSWERS: "Answers are longer than was asked for.",
    Doubt.ECHO: "Answers are the beginning of their prompts.",
    Doubt.SPEED_WITHOUT_REUSE: "Requests that reused nothing were faster than cold ones, beyond luck.",
    Doubt.HITS_SAVE_NOTHING: "Requests with confirmed reuse were not faster than cold ones.",
    Doubt.ONE_WITNESS: "Reuse is claimed, but too few independent channels say so.",
    Doubt.ANSWERS_LEFT_COLD: "Reuse changed answers more than running cold twice does.",
    Doubt.NOTHING_CONFIRMED: "No request reused anything that was confirmed.",
    Doubt.NOT_PAIRED: "Without cold, warm and rerun arms nobody can say what reuse saved.",
    Doubt.NO_NEGATIVES: "No unrelated pair was answered, so that reuse where none may be was not looked for.",
    Doubt.REQUESTS_FAILED: "More than one request of twenty failed, so that the rest may be a lucky choice.",
}
OPEN = frozenset({Doubt.NOTHING_CONFIRMED, Doubt.NOT_PAIRED, Doubt.NO_NEGATIVES, Doubt.REQUESTS_FAILED})
"""What was not shown, rather than what was shown to be wrong: it fails the default gates, not requested ones."""
INTEGRITY = frozenset({Doubt.EDITED_RESULT, Doubt.IMPOSSIBLE_NUMBERS, Doubt.MIXED_SERVERS, Doubt.FOREIGN_EVIDENCE})
"""What is wrong with the files themselves; no flag lets it pass."""
UNSEEN = (
    "A server that slows its cold requests on purpose, or that forges answers, counters and logs alike, can't be told "
    "from an honest one by asking it."
)
"""What no run of this benchmark can find, said in the report and in the guide."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason not to believe a result."""

    doubt: Doubt
    words: str

    @property
    def is_open(self) -> bool:
        return self.doubt in OPEN

    def to_line(self) -> str:
        """Return the finding as one line.

        >>> Finding(Doubt.ECHO, "3 of 3 answers begin like their prompts").to_line()
        'echo: 3 of 3 answers begin like their prompts'
        """
        return f"{self.doubt}: {self.words}"


def sort_findings(findings: list[Finding]) -> list[Finding]:
    """Return the findings, the gravest first."""
    order = list(Doubt)
    return sorted(findings, key=lambda finding: order.index(finding.doubt))
