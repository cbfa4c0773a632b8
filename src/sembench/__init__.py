"""Did reuse really help, and did it do no harm.

Four questions, answered apart: did an exact cache already cover the request; did a planner find more; did the
backend really reuse it; did time and answers come out well while negative controls stayed cold.
"""

from semblend._version import __version__

__all__ = ["__version__"]
