"""Did reuse really help, and did it do no harm.

This version ships the name and the command; the benchmark itself comes with later ones.
"""

from semblend._version import __version__

__all__ = ["__version__"]
