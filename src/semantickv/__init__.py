"""What a cache should keep: a simulator with true prefix semantics, recorded and made-up traffic, and advice.

Everything that this package reports is simulated; `semblend` reuses KV, `sembench` measures it.
"""

from semblend._version import __version__

__all__ = ["__version__"]
