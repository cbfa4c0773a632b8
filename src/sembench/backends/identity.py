"""Asks a server what it is: its models and its version. A run is continued only on the server that it was begun on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sembench.backends.base import list_cards
from sembench.backends.http_client import get_json
from sembench.values import read_text

if TYPE_CHECKING:
    import httpx

VERSION_PATHS = ("/version", "/server_info", "/get_server_info")
"""vLLM, SGLang, and SGLang before 0.5."""


async def read_identity(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """Return the URL of a server, its models and its version; None for what it does not tell."""
    listed, error = await get_json(client, f"{url}/v1/models")
    found: dict[str, Any] = {"url": url, "models": None if error else sorted(list_cards(listed)), "version": None}
    for path in VERSION_PATHS:
        told, error = await get_json(client, url + path)
        if error is None and isinstance(told, dict) and read_text(told.get("version")):
            found["version"] = told["version"]
            break
    return found
