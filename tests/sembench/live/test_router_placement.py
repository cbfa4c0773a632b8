"""From a router's headers to a gate: `sembench run-live-gateway` through `semantickv router` over two engines."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from edge_servers import serve
from live_cases import manifest, run_gateway
from lying_backend import LyingBackend

from semantickv.apps.build import build_router
from semantickv.settings import EdgeSettings
from sembench.cli import main

PATIENCE_S = 120


@contextmanager
def routing(*urls: str, policy: str):
    """A router on a real socket."""
    app = build_router(EdgeSettings(replicas=urls, policy=policy, trace=False))
    with serve(app, drain_s=1) as (url, _):
        yield url


@pytest.mark.parametrize(("policy", "code"), [("semantic_locality", 0), ("round_robin", 1)])
def test_the_gate_on_semantic_placement_passes_only_where_the_router_places(tmp_path, capsys, policy, code):
    cases = manifest(tmp_path, positives=3, negatives=1)
    with LyingBackend().serving() as one, LyingBackend().serving() as two:
        with routing(one.url, two.url, policy=policy) as url:
            result = run_gateway(url, tmp_path, "--worker-url", one.url, two.url, cases=cases)
        flags = ("--min-semantic-placement-rate", "0.7", "--max-negative-control-semantic-placement-rate", "0.0")
        assert main(["assert-result-gates", "--result", str(tmp_path / "result.json"), *flags]) == code
    placed = {record.item_id: record.route_outcome for record in result.requests}
    wanted = "semantic_placement" if policy == "semantic_locality" else "cold_fallback"
    assert {outcome for item, outcome in placed.items() if item.startswith("p")} == {wanted}
    capsys.readouterr()
