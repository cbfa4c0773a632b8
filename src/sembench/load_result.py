"""The result of a load run (``sembench.load.v1``): one point for each rate and concurrency, and every request of it.

The fields of a point have the names of ``vllm bench serve``; `sembench.scoring.load_summary` computes them from the
requests.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sembench.files import read_json_object, write_text
from sembench.values import read_float
from semblend.errors import InputError

LOAD_VERSION = "sembench.load.v1"
_HINT = "pass the output of sembench run-load"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request of a load run. Times are in milliseconds from the moment it was due, at the client."""

    number: int
    request_id: str
    due_s: float
    finished_s: float
    late_ms: float
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
    return hashlib.sha256(json.dumps(told, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


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
    value = read_json_object(path, hint=_HINT)
    if value.get("result_version") != LOAD_VERSION:
        raise InputError(f"{path} is no {LOAD_VERSION}", hint=_HINT)
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
        raise InputError(f"{where} holds no requests", hint=_HINT)
    rate, duration = value.get("request_rate"), read_float(value.get("duration"))
    if duration is None or duration <= 0:
        raise InputError(f"{where}: duration is {value.get('duration')!r}", hint=_HINT)
    own = {"request_rate", "max_concurrency", "engine", "requests"}
    return LoadPoint(
        request_rate=None if rate == "inf" else read_float(rate),
        max_concurrency=value.get("max_concurrency"),
        duration_s=duration,
        summary={name: part for name, part in value.items() if name not in own},
        requests=tuple(_parse_request(one, f"{where}, requests[{at}]") for at, one in enumerate(value["requests"])),
        engine=value["engine"] if isinstance(value.get("engine"), dict) else {},
    )


_NAMES = frozenset(f.name for f in fields(LoadRequest))
_NUMBERS = ("number", "due_s", "finished_s", "late_ms")


def _parse_request(value: Any, where: str) -> LoadRequest:
    if not isinstance(value, dict) or any(read_float(value.get(name)) is None for name in _NUMBERS):
        raise InputError(f"{where} is no request of a load run", hint=_HINT)
    known = {name: own for name, own in value.items() if name in _NAMES}
    gaps = known.get("itl_ms")
    known["itl_ms"] = tuple(gaps) if isinstance(gaps, list) else ()
    for name, own in known.items():
        wrong = name.endswith(("_ms", "_s", "_tokens")) and name != "itl_ms" and own is not None
        if wrong and read_float(own) is None:
            raise InputError(f"{where}: field {name} is {own!r}, not a number", hint=_HINT)
    return LoadRequest(**{"request_id": "", **known})
