"""The name ``semblend`` on the public index belongs to somebody else: notice it before it confuses anyone.

Our distribution is ``semblend-suite``; both write into a folder called ``semblend``, so with the two side
by side half of the files come from the other project, and nothing after that can be trusted.

This runs whenever a `SemBlend` or a command starts. It reads folder names only: importlib.metadata would take
50 ms to load, this takes 1.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence

from semblend.errors import SemBlendError

OUR_DISTRIBUTION = "semblend-suite"
FOREIGN_DISTRIBUTION = "semblend"
_METADATA_FOLDER = re.compile(rf"{FOREIGN_DISTRIBUTION}(?:-(\d[^-]*)(?:-py.*)?)?\.(?:dist|egg)-info", re.IGNORECASE)


def foreign_distribution(path: Sequence[str] | None = None) -> str | None:
    """The version of an installed distribution that is named exactly ``semblend``, or None.

    ``path`` is where to look, ``sys.path`` by default.
    """
    for folder in sys.path if path is None else path:
        for name in _names_in(folder):
            found = _METADATA_FOLDER.fullmatch(name)
            if found:
                return found.group(1) or "unknown version"
    return None


def refuse_foreign_distribution(path: Sequence[str] | None = None) -> None:
    """Raise when the other project's package is installed beside ours."""
    version = foreign_distribution(path)
    if version is not None:
        raise SemBlendError(
            f"another project's package named {FOREIGN_DISTRIBUTION} ({version}) is installed "
            f"and shares its import name with {OUR_DISTRIBUTION}",
            hint=f"pip uninstall {FOREIGN_DISTRIBUTION}; pip install --force-reinstall --no-deps {OUR_DISTRIBUTION}",
        )


def _names_in(folder: str) -> Iterator[str]:
    try:
        with os.scandir(folder or ".") as entries:
            yield from (entry.name for entry in entries)
    except OSError:
        return  # sys.path may name zip files and folders that are gone; neither can hold an installed package
