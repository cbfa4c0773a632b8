"""``uvicorn semantickv.apps.telemetry_proxy:app --http h11``: forwards to one engine and records it."""

from __future__ import annotations

from semantickv.apps.build import build_proxy
from semantickv.apps.proxy import LazyApp
from semantickv.settings import EdgeSettings

app = LazyApp(lambda: build_proxy(EdgeSettings.read()))
