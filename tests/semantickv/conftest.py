from __future__ import annotations

from collections.abc import Iterator

import aiohttp
import pytest

from semantickv.edge.upstream_call import Upstream


@pytest.fixture(autouse=True)
def no_client_is_left_to_the_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Applications that a test never shuts down leave connections whose loop is gone: they are let go here.

    A loop that still runs is a server's that several tests share: its connections stay.
    """
    opened: list[aiohttp.ClientSession] = []
    open_session = Upstream._open_session

    def remember(self: Upstream) -> aiohttp.ClientSession:
        session = open_session(self)
        if session not in opened:
            opened.append(session)
        return session

    monkeypatch.setattr(Upstream, "_open_session", remember)
    yield
    for session in opened:
        connector = session.connector
        if connector is not None and not connector._loop.is_running():
            session.detach()
            connector._conns.clear()
