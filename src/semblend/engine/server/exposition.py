"""/metrics: the server's own gauges, and the library's collectors where prometheus_client is installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from semblend.engine.server.dashboard import Tally
from semblend.engine.server.limits import Gate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(gate: Gate, tally: Tally, responses: Mapping[tuple[str, int], int]) -> str:
    """Prometheus text. Without prometheus_client the library's counters are told from the receipts the server saw."""
    parts = [
        _family("semblend_server_running", "gauge", "Requests that hold a place.", [("", gate.running)]),
        _family("semblend_server_waiting", "gauge", "Requests in line.", [("", gate.waiting)]),
        _family("semblend_server_refused_total", "counter", "Requests turned away with 429.", [("", gate.refused)]),
        _family(
            "semblend_server_responses_total",
            "counter",
            "Responses by path and status; 499 means that the client left.",
            ((_labels(path=path, status=status), count) for (path, status), count in sorted(responses.items())),
        ),
    ]
    return "".join(parts) + (_library() or _from_receipts(tally))


def _library() -> str:
    try:
        import prometheus_client
    except ImportError:
        return ""
    text: str = prometheus_client.generate_latest().decode()
    return text


def _from_receipts(tally: Tally) -> str:
    families = (
        ("semblend_requests_total", "Requests by what became of them.", "outcome", tally.outcomes),
        ("semblend_declines_total", "Requests that reused nothing, by reason.", "reason", tally.declines),
        ("semblend_tokens_total", "Prompt tokens by what a receipt says of them.", "kind", tally.tokens),
    )
    return "".join(
        _family(name, "counter", help, ((_labels(**{label: key}), count) for key, count in sorted(counts.items())))
        for name, help, label, counts in families
    )


def _family(name: str, kind: str, help: str, samples: Iterable[tuple[str, float]]) -> str:
    lines = [
        f"# HELP {name} {help}",
        f"# TYPE {name} {kind}",
        *(f"{name}{labels} {value}" for labels, value in samples),
    ]
    return "\n".join(lines) + "\n"


def _labels(**values: object) -> str:
    escaped = (
        (name, str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for name, value in values.items()
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"
