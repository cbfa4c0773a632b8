"""What a cache should keep, and where a request should go.

This version ships the name and the command; the simulator, the replay and the router come with later ones.
"""

from semblend._version import __version__

__all__ = ["__version__"]
