"""What a cache should keep: a simulator with true prefix semantics, recorded and made-up traffic, and advice.
And where a request should go: a proxy that records and a router that knows which engine has seen a prompt.

What the simulator reports is simulated; `semblend` reuses KV, `sembench` measures it.
"""

from semblend._version import __version__

__all__ = ["__version__"]
