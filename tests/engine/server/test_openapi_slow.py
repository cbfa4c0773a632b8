"""Schemathesis finds no answer that /openapi.json does not describe."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi", reason="the server needs fastapi")
schemathesis = pytest.importorskip("schemathesis", reason="the answers are checked by schemathesis")

from hypothesis import HealthCheck, Phase, seed, settings  # noqa: E402
from schemathesis import checks  # noqa: E402

from semblend.config import SemBlendConfig  # noqa: E402
from semblend.engine.server.config import ServeConfig  # noqa: E402
from semblend.engine.server.routes import create_app  # noqa: E402
from semblend.engine.server.tenants import Tenants  # noqa: E402
from semblend.facade import SemBlend  # noqa: E402
from tests.fakes.fake_engine import FakeEngine  # noqa: E402

pytestmark = pytest.mark.slow
RING = Tenants({"sk-acme": "acme"}, admin_keys=["sk-root"])


def make_schema(config: ServeConfig) -> schemathesis.BaseSchema:
    engine = FakeEngine(SemBlend(SemBlendConfig(embedder="none")), max_context=4096)
    return schemathesis.openapi.from_asgi("/openapi.json", create_app(engine, config))


without_keys, with_keys = make_schema(ServeConfig()), make_schema(ServeConfig(tenants=RING))
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
    checks.allow_header_conformance,
    checks.missing_required_header,
]
QUICK = settings(
    max_examples=15, deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@without_keys.parametrize()
@seed(13)
@QUICK
def test_no_answer_without_keys_is_undescribed(case):
    case.call_and_validate(checks=CHECKS)


@pytest.mark.parametrize("key", ["sk-acme", "sk-nobody"])  # without keys everybody is admin: the test above
@with_keys.parametrize()
@seed(13)
@QUICK
def test_no_answer_with_keys_is_undescribed(case, key):
    case.headers = {
        name: value
        for name, value in (case.headers or {}).items()
        if name.lower() not in ("authorization", "x-api-key")
    }
    case.call_and_validate(checks=CHECKS, headers={"Authorization": f"Bearer {key}"})
