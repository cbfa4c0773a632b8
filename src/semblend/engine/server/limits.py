"""What a server refuses: texts that cannot fit, pages that are not ours, requests beyond the places in line."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import deque
from collections.abc import Sequence
from urllib.parse import urlsplit

from semblend.engine.server.config import ServeConfig
from semblend.wire.errors import ApiError


def refuse_long_texts(lengths: Sequence[int], context_chars: int, list_chars: int, param: str) -> None:
    """400 for texts, by their ``lengths`` in characters, that cannot fit the context however they are tokenized.

    ``context_chars`` is the context in tokens times the characters of the longest token; ``list_chars`` bounds several
    texts together. A tokenizer takes seconds and gigabytes for a text of 16 MB: it must not see one in vain.

    >>> refuse_long_texts([2001], 2000, 10_000, "text")
    Traceback (most recent call last):
    semblend.wire.errors.ApiError: text has 2001 characters, the context holds at most 2000 (hint: send a shorter text)
    """
    longest, total, most = max(lengths, default=0), sum(lengths), max(context_chars, list_chars)
    if longest > context_chars:
        problem, hint = f"has {longest} characters, the context holds at most {context_chars}", "send a shorter text"
    elif len(lengths) > 1 and total > most:
        problem, hint = f"has {total} characters in {len(lengths)} texts, more than {most}", "send several requests"
    else:
        return
    raise ApiError(400, f"{param} {problem}", hint=hint, param=param, code="context_length_exceeded")


def refuse_foreign_page(host: str, origin: str | None, config: ServeConfig) -> None:
    """403 where a browser calls on behalf of a page that is not ours, or under a name that is not this machine's.

    Without this, any page that a person opens could read their donors or flush their cache.
    """
    if config.local_only and not _is_local(_read_host(f"//{host}")):
        raise ApiError(403, f"this server does not answer to the name {host[:100]!r}", hint="call it as localhost")
    if origin is None or origin in config.origins or _read_part(origin, "netloc") == host:
        return
    raise ApiError(403, f"the page {origin[:100]!r} may not call this server", hint="add it to the allowed origins")


def _read_part(url: str, name: str) -> str | None:
    try:
        found: str | None = getattr(urlsplit(url), name)
    except ValueError:
        return None
    return found


def _read_host(url: str) -> str:
    return _read_part(url, "hostname") or ""


def _is_local(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Gate:
    """Lets ``max_running`` in, keeps ``max_waiting`` in line (first come, first served), and turns the rest away.

    For one event loop. Whoever got in must `leave`.
    """

    def __init__(self, max_running: int, max_waiting: int, retry_after_s: int = 1) -> None:
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.running = 0
        self.refused = 0
        self._retry_after_s = retry_after_s
        self._line: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._line)

    async def enter(self) -> None:
        if self.running < self.max_running:
            self.running += 1
            return
        if len(self._line) >= self.max_waiting:
            self.refused += 1
            raise ApiError(
                429,
                f"{self.running} requests are running and {len(self._line)} waiting",
                hint="try again later",
                code="queue_full",
                retry_after_s=self._retry_after_s,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._line.remove(turn)
            else:
                self.leave()  # the place was handed over in the very moment of giving up
            raise

    def leave(self) -> None:
        """Hand the place to the next in line, or leave it free."""
        for turn in self._line:
            if not turn.done():
                self._line.remove(turn)
                turn.set_result(None)
                return
        self.running -= 1
