"""matplotlib, where somebody wants a picture: imported late, and into a file, never a window."""

from __future__ import annotations

import importlib
from typing import Any

from semblend.errors import MissingDependencyError
from semblend.web.charts import read_palette

COLOURS = read_palette()
INK, FAINT, PAPER, GRID = COLOURS["ink"], COLOURS["dim"], COLOURS["paper"], COLOURS["line"]


def pyplot(what: str, instead: str = "") -> Any:
    """``matplotlib.pyplot``; where it is missing, an error that names ``what`` needs it and what to do ``instead``."""
    try:
        importlib.import_module("matplotlib").use("agg")
        return importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        hint = "pip install 'semblend-suite[lab]'" + (f", or {instead}" if instead else "")
        raise MissingDependencyError(f"{what} the package {error.name}", hint=hint) from None
