"""An application that reads its settings when the server starts it, so that importing it needs none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from semblend.errors import SemBlendError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


class LazyApp:
    """Builds the real application at its first call, which a server makes to start it."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._app: Any = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            try:
                self._app = self._build()
            except SemBlendError as error:
                if scope["type"] != "lifespan":
                    raise
                await receive()
                await send({"type": "lifespan.startup.failed", "message": f"error: {error}"})
                return
        await self._app(scope, receive, send)
