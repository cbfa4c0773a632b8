"""A server on this machine that answers every request as a test says, and a client for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from sembench.backends import open_client


@asynccontextmanager
async def answering(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[tuple[ClientSession, str]]:
    """Serve ``answer`` for every path and method; yield a client and the address of the server."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, open_client(5) as client:
        yield client, f"http://127.0.0.1:{server.port}"


def say(text: str) -> web.Response:
    """Answer a chat request with a text."""
    body: dict[str, Any] = {"choices": [{"message": {"content": text}}]}
    return web.json_response(body)
