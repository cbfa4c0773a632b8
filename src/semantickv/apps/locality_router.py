"""``uvicorn semantickv.apps.locality_router:app --http h11``: each request goes where most of its prompt is."""

from __future__ import annotations

from semantickv.apps.build import build_router
from semantickv.apps.proxy import LazyApp
from semantickv.settings import EdgeSettings

app = LazyApp(lambda: build_router(EdgeSettings.read()))
