"""The link between routers that the settings ask for. Importing this module needs neither msgspec nor redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from semantickv.settings import EdgeSettings
from semblend.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from semantickv.shared_state.news import ExchangeT
    from semantickv.shared_state.redis_link import RedisLink


def open_link(settings: EdgeSettings, make_exchange: Callable[[], ExchangeT]) -> RedisLink[ExchangeT] | None:
    """The link to other routers; None where no Redis is named. ``make_exchange`` may import what the link needs."""
    if not settings.redis_url:
        return None
    if not settings.hash_key:
        raise ConfigError(
            "SEMANTICKV_REDIS_URL without SEMANTICKV_HASH_KEY: hashes in Redis could be guessed",
            hint="give all routers one secret in SEMANTICKV_HASH_KEY",
        )
    try:
        from semantickv.shared_state.redis_link import RedisLink

        exchange = make_exchange()
    except ImportError:
        raise MissingDependencyError("shared state needs msgspec", hint="pip install 'semblend-suite[edge]'") from None
    return RedisLink(settings.redis_url, settings.redis_group, exchange)
