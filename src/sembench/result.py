"""The result file (``sembench.result.v2``): one record for each request, and what follows from them.

A field that nobody observed is None, in Python and in JSON: null is not zero. Files of the first version read as
well; their missing fields are None.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sembench.files import read_json_object, write_text
from semblend.errors import InputError

RESULT_VERSION = "sembench.result.v2"
READABLE_VERSIONS = ("sembench.result.v1", RESULT_VERSION)
ARMS = ("cold", "warm", "rerun", "single", "paired")
OUTPUT_TEXT_CHARS = 2000
_FIELDS_HINT = "docs/METRICS.md, section Result file, lists the fields"


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One replayed request. Quantities end in ``_tokens``, ``_blocks``, ``_ms``."""

    item_id: str
    dataset: str
    transform: str
    negative_control: bool
    source_id: str | None = None
    pair_id: str | None = None
    arm: str | None = None
    tenant: str | None = None
    cross_tenant: bool | None = None
    traffic_class: str | None = None
    donor_count: int | None = None
    prompt_tokens: int | None = None
    total_blocks: int | None = None
    # offline: what an exact cache has, what a planner proposes, how much of that is right
    exact_hit_blocks: int | None = None
    exact_hit_tokens: int | None = None
    exact_prefix_hit_blocks: int | None = None
    exact_prefix_hit_tokens: int | None = None
    semantic_candidate_blocks: int | None = None
    semantic_candidate_tokens: int | None = None
    semantic_eligible_blocks: int | None = None
    semantic_eligible_tokens: int | None = None
    wrong_tokens: int | None = None
    semblend_found: bool | None = None
    semblend_similarity: float | None = None
    semblend_reuse_ratio: float | None = None
    semblend_latency_ms: float | None = None
    donor_ids: tuple[str, ...] = ()
    rejection_reason: str | None = None
    # what the backend says it did
    backend_confirmed_blocks: int | None = None
    backend_confirmed_tokens: int | None = None
    confirmation_sources: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()
    exact_tokens: int | None = None
    reused_tokens: int | None = None
    recomputed_tokens: int | None = None
    prefill_tokens: int | None = None
    risk: float | None = None
    fuzzy_confirmed_tokens: int | None = None
    external_confirmed_tokens: int | None = None
    external_confirmed_tokens_source: str | None = None
    engine_request_id: str | None = None
    request_ids: tuple[str, ...] = ()
    donor_request_ids: tuple[str, ...] = ()
    malformed: tuple[str, ...] = ()
    expected_supplied_tokens: int | None = None
    expected_span_target_start: int | None = None
    audit_joined: bool | None = None
    audit_observed_boundary: int | None = None
    audit_advertised_tokens: int | None = None
    audit_advertised_target_start: int | None = None
    audit_boundary_at_span_start: bool | None = None
    audit_load_allocated: bool | None = None
    audit_materialized: bool | None = None
    audit_declined_reasons: tuple[str, ...] = ()
    # where the request went
    route_endpoint_id: str | None = None
    route_outcome: str | None = None
    route_semantic_score: float | None = None
    route_total_score: float | None = None
    route_reason: str | None = None
    gateway_route_header: str | None = None
    worker_id: str | None = None
    donor_worker_ids: tuple[str, ...] = ()
    # time, at the client unless the name says otherwise
    sent_unix_s: float | None = None
    finished_unix_s: float | None = None
    ttft_ms: float | None = None
    latency_ms: float | None = None
    server_ttft_ms: float | None = None
    engine_ttft_ms: float | None = None
    queue_time_ms: float | None = None
    flush_contaminated: bool | None = None
    # the answer, against the gold answer and against the cold one
    max_tokens: int | None = None
    output_text: str | None = None
    output_tokens: int | None = None
    output_token_ids: tuple[int, ...] | None = None
    output_top_logprobs: Any = None
    finish_reason: str | None = None
    quality_pass: bool | None = None
    quality_score: float | None = None
    quality_f1: float | None = None
    quality_rouge_l: float | None = None
    exact_match: float | None = None
    judge_score: float | None = None
    planted_fact_answered: bool | None = None
    donor_fact_answered: bool | None = None
    cold_f1: float | None = None
    cold_rouge_l: float | None = None
    cold_kl_topk: float | None = None
    first_divergence: int | None = None
    echoes_prompt: bool | None = None
    edit_similarity: float | None = None
    ppl_ratio: float | None = None
    error: str | None = None

    @property
    def cluster(self) -> str:
        """The document. Intervals are clustered by it, since cases cut from one document are not independent."""
        return self.source_id or self.item_id


@dataclass(frozen=True, kw_only=True)
class Result:
    """A result file: who ran what where, the aggregates, and every request.

    ``digest`` is written with the file and kept as it was read; `compute_digest` tells whether it still holds.
    """

    created_at_utc: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    aggregate: Mapping[str, Any]
    by_transform: Mapping[str, Any]
    requests: tuple[RequestRecord, ...]
    run: Mapping[str, Any] | None = None
    engine: Mapping[str, Any] | None = None
    paired: Mapping[str, Any] | None = None
    result_version: str = RESULT_VERSION
    digest: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


# -- records -------------------------------------------------------------------------------------------------------

_FIELDS = {f.name: str(f.type) for f in fields(RequestRecord)}
_REQUIRED = ("item_id", "dataset", "transform", "negative_control")


def dump_record(record: RequestRecord) -> dict[str, Any]:
    """Return a record as JSON values: every field, unknown ones as None, tuples as lists."""
    values = {name: getattr(record, name) for name in _FIELDS}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def parse_record(value: Any, *, where: str = "request") -> RequestRecord:
    """Return a record from parsed JSON. Unknown keys are left out; the error about a wrong type names the field."""
    if not isinstance(value, dict):
        raise InputError(
            f"{where} is {type(value).__name__}, not an object",
            hint=_FIELDS_HINT,
        )
    for name in _REQUIRED:
        if name not in value:
            raise InputError(f"{where}: field {name} is missing", hint=_FIELDS_HINT)
    known = {name: _check_value(value[name], kind, name, where) for name, kind in _FIELDS.items() if name in value}
    return RequestRecord(**known)


def _check_value(value: Any, kind: str, name: str, where: str) -> Any:
    if kind == "Any":
        return value
    if value is None and (kind.endswith("None") or kind.startswith("tuple")):
        return None if kind.endswith("None") else ()
    if kind.startswith("tuple"):
        inner = int if "int" in kind else str
        if isinstance(value, (list, tuple)) and all(isinstance(item, inner) for item in value):
            return tuple(value)
    elif kind.startswith("bool"):
        if isinstance(value, bool):
            return value
    elif kind.startswith("str"):
        if isinstance(value, str):
            return value
    elif isinstance(value, (int, float) if kind.startswith("float") else int) and not isinstance(value, bool):
        return value
    raise InputError(f"{where}: field {name} is {value!r}, not {kind}", hint=_FIELDS_HINT)


# -- result files --------------------------------------------------------------------------------------------------


def compute_digest(result: Result) -> str:
    """Return the SHA-256 of everything in a result that is not computed from its requests.

    It shows that a file was edited or cut. It is no signature: who writes a whole new file writes a new digest too.
    """
    told = {
        "run": result.run,
        "config": result.config,
        "engine": result.engine,
        "requests": [dump_record(record) for record in result.requests],
    }
    text = json.dumps(told, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def dump_result(result: Result) -> dict[str, Any]:
    return {
        **result.extra,
        "result_version": result.result_version,
        "digest": result.digest,
        "created_at_utc": result.created_at_utc,
        "run": result.run,
        "config": result.config,
        "engine": result.engine,
        "environment": result.environment,
        "aggregate": result.aggregate,
        "paired": result.paired,
        "by_transform": result.by_transform,
        "requests": [dump_record(record) for record in result.requests],
    }


def write_result(path: str | Path, result: Result) -> None:
    """Write the result with its digest, whole or not at all. NaN and infinity are refused, since JSON has neither."""
    try:
        text = json.dumps(
            dump_result(replace(result, digest=compute_digest(result))), indent=1, ensure_ascii=False, allow_nan=False
        )
    except ValueError as error:
        raise InputError(f"the result for {path} is not plain JSON: {error}", hint="report this") from None
    write_text(path, text + "\n")


def read_result(path: str | Path) -> Result:
    """Read and check a result file; the error says if it was cut off or has another version."""
    value = read_json_object(path, hint="if the run was cut off, run it again with --resume")
    if "result_version" not in value:
        raise InputError(f"{path} holds no result_version: it is no result of sembench", hint="check the path")
    version = value["result_version"]
    if version not in READABLE_VERSIONS:
        raise InputError(
            f"{path} is a {version}; this version reads {' and '.join(READABLE_VERSIONS)}", hint="upgrade sembench"
        )
    parts = {
        name: _read_part(value, name, dict, path) for name in ("config", "environment", "aggregate", "by_transform")
    }
    requests = _read_part(value, "requests", list, path)
    known = {f.name for f in fields(Result)} - {"extra"}
    return Result(
        **parts,
        created_at_utc=str(value.get("created_at_utc", "")),
        run=_read_part(value, "run", dict, path, optional=True),
        engine=_read_part(value, "engine", dict, path, optional=True),
        paired=_read_part(value, "paired", dict, path, optional=True),
        requests=tuple(parse_record(item, where=f"{path}, requests[{at}]") for at, item in enumerate(requests)),
        result_version=version,
        digest=value["digest"] if isinstance(value.get("digest"), str) else None,
        extra={name: own for name, own in value.items() if name not in known},
    )


def _read_part(value: Mapping[str, Any], name: str, kind: type, path: str | Path, *, optional: bool = False) -> Any:
    found = value.get(name)
    if found is None and optional:
        return None
    if not isinstance(found, kind):
        what = "missing" if found is None else type(found).__name__
        raise InputError(f"{path}: {name} is {what}, not {kind.__name__}", hint="run the benchmark again")
    return found
