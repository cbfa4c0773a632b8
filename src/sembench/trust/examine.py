"""Examines a result with all evidence that came with it: what is believed of it, and why not the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sembench.result import RequestRecord, Result
from sembench.trust.behaviour import find_doubtful_behaviour
from sembench.trust.binding import BoundSummary, bind_summaries, check_calibration, check_manifest
from sembench.trust.channels import MIN_WITNESSES, require_witnesses
from sembench.trust.doubts import Finding, sort_findings
from sembench.trust.integrity import check_integrity


@dataclass(frozen=True, slots=True)
class Examination:
    """What is believed of a result: its requests with reuse as far as it is witnessed, and its engine logs."""

    findings: tuple[Finding, ...]
    records: tuple[RequestRecord, ...]
    summaries: tuple[BoundSummary, ...]

    @property
    def grave(self) -> tuple[Finding, ...]:
        """Findings that show something wrong; the others only name what was not shown."""
        return tuple(finding for finding in self.findings if not finding.is_open)


def examine(
    result: Result,
    summaries: Sequence[Mapping[str, Any]] = (),
    *,
    min_witnesses: int = MIN_WITNESSES,
    manifest: str = "",
    calibration: Mapping[str, Any] | None = None,
) -> Examination:
    """Examine a result, the engine summaries, the manifest and the noise floor that are said to belong to it."""
    bound, foreign = bind_summaries(summaries, result)
    findings = [*check_integrity(result), *foreign]
    findings += check_manifest(result, manifest) if manifest else []
    findings += check_calibration(result, calibration) if calibration is not None else []
    logged = {name: tokens for one in bound for name, tokens in one.tokens_by_request.items()}
    size = result.config.get("block_size")
    block_size = size if isinstance(size, int) and size > 0 else 16
    records, alone = require_witnesses(result.requests, min_witnesses, logged, block_size)
    if is_live(result):
        findings += [*alone, *find_doubtful_behaviour(records)]
    return Examination(tuple(sort_findings(findings)), tuple(records), tuple(bound))


def is_live(result: Result) -> bool:
    """Return whether a server was asked; an offline replay claims no reuse and has no times."""
    return result.config.get("mode") != "offline" and any(record.ttft_ms is not None for record in result.requests)
