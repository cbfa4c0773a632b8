"""How far an answer may be from a cold one: modes and numbers.

`scale` reads and spells them. `tenants` says whose word counts for a request, `request_options` reads a caller's.
"""

from semblend.quality.request_options import RequestOptions, read_request_options
from semblend.quality.scale import (
    GATED_MODE,
    MODE_NATS,
    QUALITY_HINT,
    QUALITY_MODES,
    find_path,
    parse_quality,
    read_nats,
)
from semblend.quality.tenants import choose_quality, parse_tenant_qualities

__all__ = [
    "GATED_MODE",
    "MODE_NATS",
    "QUALITY_HINT",
    "QUALITY_MODES",
    "RequestOptions",
    "choose_quality",
    "find_path",
    "parse_quality",
    "parse_tenant_qualities",
    "read_nats",
    "read_request_options",
]
