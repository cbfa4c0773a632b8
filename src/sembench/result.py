"""The result files: of single requests (``sembench.result.v2``) and of a load run (``sembench.load.v1``).

A field that nobody observed is None, in Python and in JSON: null is not zero. Files of the first version read as
well; their missing fields are None.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sembench.files import read_fields, read_float, read_json_object, write_text
from semblend._version import __version__
from semblend.errors import InputError

# -- who ran what, where and with which code -------------------------------------------------------------------------


def get_utc_time() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def get_unix_time() -> float:
    """Return the wall clock in Unix seconds. It ties evidence to a run; durations come from clocks that can't jump."""
    return datetime.now(UTC).timestamp()


def make_run_id(prefix: str) -> str:
    return f"{prefix}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"


def describe_run(
    *,
    engine: str,
    manifest_path: str,
    manifest_sha256: str,
    run_id: str | None = None,
    arm: str = "single",
    engine_version: str | None = None,
    backend_id: str | None = None,
    baseline_id: str | None = None,
) -> dict[str, Any]:
    """Return the ``run`` object of a result file."""
    sha, dirty = read_git_state()
    return {
        "run_id": run_id or make_run_id(engine),
        "engine": engine,
        "manifest_path": manifest_path,
        "manifest_sha256": manifest_sha256,
        "arm": arm,
        "engine_version": engine_version,
        "backend_id": backend_id,
        "baseline_id": baseline_id,
        "sembench_version": __version__,
        "sembench_git_sha": sha,
        "sembench_git_dirty": dirty,
        "semblend_version": __version__,
        "timestamp_utc": get_utc_time(),
        "python_version": platform.python_version(),
        "run_host": platform.node(),
    }


def describe_environment() -> dict[str, Any]:
    """Return the ``environment`` object of a result file."""
    return {"python": platform.python_version(), "platform": platform.platform(), "host": platform.node()}


def read_git_state() -> tuple[str | None, bool | None]:
    """Return the commit and whether the tree differs from it; both None outside a checkout."""
    here = Path(__file__).resolve().parent
    if not any((folder / ".git").exists() for folder in here.parents):
        return None, None
    try:
        sha = _run_git(here, "rev-parse", "HEAD")
        return sha or None, bool(_run_git(here, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _run_git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20, check=True
    )  # fmt: skip
    return done.stdout.strip()


# -- a result of single requests -------------------------------------------------------------------------------------

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


def dump_record(record: RequestRecord) -> dict[str, Any]:
    """Return a record as JSON values: every field, unknown ones as None, tuples as lists."""
    values = ((f.name, getattr(record, f.name)) for f in fields(RequestRecord))
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values}


def parse_record(value: Any, *, where: str = "request") -> RequestRecord:
    """Return a record from parsed JSON. Unknown keys are left out; the error about a wrong type names the field."""
    return RequestRecord(**read_fields(RequestRecord, value, where, _FIELDS_HINT))


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
    return _hash_json(told)


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def dump_result(result: Result) -> dict[str, Any]:
    names = ("result_version", "digest", "created_at_utc", "run", "config", "engine", "environment", "aggregate")
    return {
        **result.extra,
        **{name: getattr(result, name) for name in (*names, "paired", "by_transform")},
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


# -- a load result ---------------------------------------------------------------------------------------------------
# The result of a load run (``sembench.load.v1``): one point for each rate and concurrency, and every request of it.
#
# The fields of a point have the names of ``vllm bench serve``; `sembench.scoring.aggregate` computes them from the
# requests.

LOAD_VERSION = "sembench.load.v1"
_LOAD_HINT = "pass the output of sembench run-load"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request of a load run. Times are in milliseconds from the moment it was due, at the client."""

    number: int
    due_s: float
    finished_s: float
    late_ms: float
    request_id: str = ""
    ttft_ms: float | None = None
    e2el_ms: float | None = None
    tpot_ms: float | None = None
    itl_ms: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reused_tokens: int | None = None
    conversation: int | None = None
    turn: int = 0
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and self.ttft_ms is not None

    def meets(self, slo: Mapping[str, float]) -> bool:
        """Return whether every promised time (``ttft``, ``tpot``, ``e2el``) was kept."""
        values = {"ttft": self.ttft_ms, "tpot": self.tpot_ms or 0.0, "e2el": self.e2el_ms}
        return all((value := values[name]) is not None and value <= limit for name, limit in slo.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One point of a sweep: what was asked, what came out, and every request. A rate of None sends all at once."""

    request_rate: float | None
    max_concurrency: int | None
    duration_s: float
    summary: Mapping[str, Any]
    requests: tuple[LoadRequest, ...]
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The point in words.

        >>> LoadPoint(request_rate=2.0, max_concurrency=None, duration_s=1.0, summary={}, requests=()).name
        '2 requests a second'
        """
        rate = "all at once" if self.request_rate is None else f"{self.request_rate:g} requests a second"
        return rate + (f", {self.max_concurrency} under way at most" if self.max_concurrency else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """A load run: who ran what where, and its points."""

    run: Mapping[str, Any]
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    points: tuple[LoadPoint, ...]
    digest: str | None = None

    @property
    def slo(self) -> dict[str, float]:
        found = self.config.get("slo")
        return {str(name): float(limit) for name, limit in found.items()} if isinstance(found, dict) else {}


# -- files ---------------------------------------------------------------------------------------------------------


def compute_load_digest(result: LoadResult) -> str:
    """Return the SHA-256 of run, settings and requests. It shows an edit; it is no signature."""
    told = {
        "run": result.run,
        "config": result.config,
        "points": [[p.request_rate, p.max_concurrency, p.duration_s, [asdict(r) for r in p.requests]]
                   for p in result.points],
    }  # fmt: skip
    return _hash_json(told)


def dump_point(point: LoadPoint) -> dict[str, Any]:
    """Return a point as JSON values; its summary lies beside what was asked, as ``vllm bench serve`` writes it."""
    return {
        "request_rate": "inf" if point.request_rate is None else point.request_rate,
        "max_concurrency": point.max_concurrency,
        **point.summary,
        "engine": dict(point.engine),
        "requests": [asdict(one) for one in point.requests],
    }


def write_load_result(path: str | Path, result: LoadResult, **more: Any) -> None:
    """Write a load result. The fields of its last point stand at the top, too, as other tools expect them."""
    sealed = replace(result, digest=compute_load_digest(result))
    last = sealed.points[-1]
    value = {
        "result_version": LOAD_VERSION,
        "digest": sealed.digest,
        "run": dict(sealed.run),
        "config": dict(sealed.config),
        "environment": dict(sealed.environment),
        **{name: own for name, own in dump_point(last).items() if name != "requests"},
        "num_prompts": len(last.requests),
        **more,
        "points": [dump_point(point) for point in sealed.points],
    }
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def is_load_result(path: str | Path) -> bool:
    """Return whether a file is a load result, by its version."""
    return read_json_object(path, hint="if the run was cut off, run it again with --resume").get("result_version") == (
        LOAD_VERSION
    )


def read_load_result(path: str | Path) -> LoadResult:
    """Read and check a load result."""
    value = read_json_object(path, hint=_LOAD_HINT)
    if value.get("result_version") != LOAD_VERSION:
        raise InputError(f"{path} is no {LOAD_VERSION}", hint=_LOAD_HINT)
    points = value.get("points")
    if not isinstance(points, list) or not points:
        raise InputError(f"{path} holds no point", hint="run the load again")
    names = ("run", "config", "environment")
    parts = {name: value[name] if isinstance(value.get(name), dict) else {} for name in names}
    digest = value.get("digest")
    return LoadResult(
        **parts,
        points=tuple(parse_point(point, f"{path}, points[{at}]") for at, point in enumerate(points)),
        digest=digest if isinstance(digest, str) else None,
    )


def parse_point(value: Any, where: str) -> LoadPoint:
    """Return a point from parsed JSON; the error names the place."""
    if not isinstance(value, dict) or not isinstance(value.get("requests"), list):
        raise InputError(f"{where} holds no requests", hint=_LOAD_HINT)
    rate, duration = value.get("request_rate"), read_float(value.get("duration"))
    if duration is None or duration <= 0:
        raise InputError(f"{where}: duration is {value.get('duration')!r}", hint=_LOAD_HINT)
    own = {"request_rate", "max_concurrency", "engine", "requests"}
    return LoadPoint(
        request_rate=None if rate == "inf" else read_float(rate),
        max_concurrency=value.get("max_concurrency"),
        duration_s=duration,
        summary={name: part for name, part in value.items() if name not in own},
        requests=tuple(_parse_request(one, f"{where}, requests[{at}]") for at, one in enumerate(value["requests"])),
        engine=value["engine"] if isinstance(value.get("engine"), dict) else {},
    )


def _parse_request(value: Any, where: str) -> LoadRequest:
    found = read_fields(LoadRequest, value, where, _LOAD_HINT)
    for name, own in found.items():
        if isinstance(own, (int, float)) and read_float(own) is None:
            raise InputError(f"{where}: field {name} is {own!r}, not a number", hint=_LOAD_HINT)
    return LoadRequest(**found)
