"""What became of a request: six words, the same in values, events, logs, metrics and dashboards."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """How a request was served. Only one of the six is reuse, and only a backend's receipt can say so."""

    EXACT_PREFIX_ROUTE = "exact_prefix_route"
    """The engine or a router had an exact prefix hit. It wins before semantic reuse and is never counted as it."""

    SEMANTIC_DISCOVERY_ONLY = "semantic_discovery_only"
    """A donor was found and reported, but it changed neither where the request ran nor what was computed."""

    SEMANTIC_PLACEMENT = "semantic_placement"
    """A router chose the endpoint because of a donor there. Whether its KV was used is not known from this."""

    BACKEND_MATERIALIZED_REUSE = "backend_materialized_reuse"
    """The backend confirms that the request ran on donor KV. The only outcome that counts as reuse."""

    BACKEND_DECLINED_REUSE = "backend_declined_reuse"
    """The backend looked at a plan and refused: stale donor, other namespace, no room, unsupported, failed check."""

    COLD_FALLBACK = "cold_fallback"
    """Normal prefill. Expected whenever nothing is shared or worth sharing; it is not a failure."""
