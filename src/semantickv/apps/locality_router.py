"""``uvicorn semantickv.apps.locality_router:app``: sends each request to the replica that has most of its prompt."""

from __future__ import annotations

from semantickv.apps.build import build_router
from semantickv.apps.lazy import LazyApp
from semantickv.settings import EdgeSettings

app = LazyApp(lambda: build_router(EdgeSettings.read()))
