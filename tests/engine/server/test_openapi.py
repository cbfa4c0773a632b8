"""/openapi.json describes every route, and nothing else."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi", reason="the server needs fastapi")

from starlette.testclient import TestClient

from semblend.config import SemBlendConfig
from semblend.engine.server.openapi import OPERATIONS
from semblend.engine.server.routes import create_app
from semblend.facade import SemBlend
from tests.fakes.fake_engine import FakeEngine


def test_every_route_is_described_and_nothing_else():
    app = create_app(FakeEngine(SemBlend(SemBlendConfig(embedder="none"))))
    routes = {(method, route.path.replace(":path", "")) for route in app.routes for method in route.methods - {"HEAD"}}
    assert routes == {(operation.method, operation.path) for operation in OPERATIONS}
    served = TestClient(app).get("/openapi.json").json()
    assert served == json.loads(json.dumps(app.openapi()))
    assert {(method.upper(), path) for path, found in served["paths"].items() for method in found} == routes
