"""The environment variables of sembench. Only this module reads the environment."""

from __future__ import annotations

import os

VARIABLES = {
    "SEMBENCH_LONGBENCH_DIR": "Folder with LongBench files; stands in for --longbench-dir where that is not given.",
}


def read_variable(name: str) -> str:
    """Return the value of a variable that is listed above, or an empty text where it is not set."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not listed in sembench.settings.VARIABLES")
    return os.environ.get(name, "")
