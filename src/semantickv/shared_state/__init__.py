"""What several routers tell each other through Redis: placements, load, hints about replicas that fail.

A router decides by what it knows itself. Redis carries news between routers and is never asked during a request: when
it is slow or gone, each router goes on with its own knowledge, and they meet again when it is back.

Importing this package needs neither msgspec nor redis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from semantickv.settings import EdgeSettings
from semblend.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from semantickv.shared_state.redis_link import RedisLink
    from semantickv.shared_state.sync import SyncT


def open_link(settings: EdgeSettings, make_sync: Callable[[], SyncT]) -> RedisLink[SyncT] | None:
    """The link to other routers; None where no Redis is named. ``make_sync`` may import what the link needs."""
    if not settings.redis_url:
        return None
    if not settings.hash_key:
        raise ConfigError(
            "SEMANTICKV_REDIS_URL without SEMANTICKV_HASH_KEY: hashes in Redis could be guessed",
            hint="give all routers one secret in SEMANTICKV_HASH_KEY",
        )
    try:
        from semantickv.shared_state.redis_link import RedisLink

        sync = make_sync()
    except ImportError:
        raise MissingDependencyError("shared state needs msgspec", hint="pip install 'semblend-suite[edge]'") from None
    return RedisLink(settings.redis_url, settings.redis_group, sync, settings.redis_secret or settings.hash_key)
