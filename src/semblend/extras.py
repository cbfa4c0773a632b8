"""Which optional packages there are, which extra brings them, and which command wants them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata

DISTRIBUTION = "semblend-suite"
MODULES = {"yaml": "pyyaml", "zmq": "pyzmq", "nats": "nats-py", "opentelemetry": "opentelemetry-api"}
"""Modules whose package has another name."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One package and the versions of it that are accepted; ``extra`` is empty for what always comes along."""

    package: str
    versions: str
    extra: str


def requirements() -> tuple[Requirement, ...]:
    """What the installed distribution asks for; empty when the code runs without being installed."""
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return ()
    return tuple(_parse(line) for line in lines)


def extras() -> dict[str, tuple[Requirement, ...]]:
    """Extra to its packages, as pyproject.toml has them; an extra may bring none."""
    found: dict[str, list[Requirement]] = {name: [] for name in _read_declared_extras()}
    for one in requirements():
        if one.extra:
            found.setdefault(one.extra, []).append(one)
    return {name: tuple(packages) for name, packages in found.items()}


def find_extra(module: str) -> str | None:
    """The extra that brings the package of a module, or None where none does.

    >>> find_extra("no_such_module") is None
    True
    """
    package = MODULES.get(module.partition(".")[0], module.partition(".")[0]).replace("_", "-").lower()
    for extra, wanted in extras().items():
        if extra != "dev" and package in {one.package.partition("[")[0].lower() for one in wanted}:
            return extra
    return None


def _read_declared_extras() -> list[str]:
    try:
        return metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return []


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _parse(line: str) -> Requirement:
    """``'triton>=3.0; platform_system == "Linux" and extra == "gpu"'`` in parts."""
    wanted, _, marker = line.partition(";")
    name = re.match(r"\s*([A-Za-z0-9._-]+(?:\[[^\]]*\])?)\s*(.*)", wanted)
    extra = re.search(r"""extra\s*==\s*["']([^"']+)["']""", marker)
    if name is None:
        raise ValueError(f"unreadable requirement {line!r}")
    return Requirement(name[1], name[2].strip().strip("()"), extra[1] if extra else "")
