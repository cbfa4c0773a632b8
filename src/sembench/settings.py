"""What sembench reads from the environment, all of it, and only here."""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLES = {
    "SEMBENCH_LONGBENCH_DIR": "Folder with LongBench files; stands in for --longbench-dir where that is not given.",
}


def read_variable(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The value of a variable that is listed above; empty where it is not set.

    >>> read_variable("SEMBENCH_LONGBENCH_DIR", {})
    ''
    """
    if name not in VARIABLES:
        raise KeyError(f"{name} is not listed in sembench.settings.VARIABLES")
    return (os.environ if environ is None else environ).get(name, "")
