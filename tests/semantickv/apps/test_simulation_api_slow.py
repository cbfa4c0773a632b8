"""Schemathesis finds no request at which the simulation API fails."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, seed, settings

from semantickv.apps.simulation_api import build_api
from semantickv.settings import ApiSettings

schemathesis = pytest.importorskip("schemathesis", reason="the answers are checked by schemathesis")
pytestmark = pytest.mark.slow
described = schemathesis.openapi.from_asgi("/openapi.json", build_api(ApiSettings()))


@described.parametrize()
@seed(17)
@settings(
    max_examples=25, deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
def test_nothing_that_is_sent_gives_a_5xx(case):
    case.call_and_validate(checks=[schemathesis.checks.not_a_server_error], timeout=300)
