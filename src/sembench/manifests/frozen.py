"""A frozen set of manifests: a small file with their checksums and counts.

Manifests stay out of version control (their texts belong to others); the frozen file goes in, and anybody who builds
the manifests again can see whether they are the same work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sembench.files import hash_file, read_json_object
from sembench.manifests.cases import read_manifest
from semblend.errors import InputError

FROZEN_VERSION = "sembench.frozen.v1"
ENDINGS = (".jsonl", ".jsonl.gz")


def describe_manifest(path: Path) -> dict[str, Any]:
    """Return the checksum and the counts of one manifest. A bad line raises an error."""
    transforms: Counter[str] = Counter()
    versions: set[str] = set()
    negatives = 0
    for case in read_manifest(path):
        transforms[case.transform] += 1
        versions.add(case.benchmark_version)
        negatives += case.negative_control
    return {
        "sha256": hash_file(path),
        "items": transforms.total(),
        "negative_controls": negatives,
        "benchmark_versions": sorted(versions),
        "by_transform": dict(sorted(transforms.items())),
    }


def list_manifests(folder: str) -> list[Path]:
    """Return the manifests of a folder, sorted by name."""
    if not Path(folder).is_dir():
        raise InputError(f"{folder} is not a folder", hint="pass the folder that sembench build wrote to")
    return sorted(path for path in Path(folder).iterdir() if path.name.endswith(ENDINGS))


def read_frozen(path: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the description of every frozen manifest by name."""
    value = read_json_object(path, hint="freeze the manifests again")
    if value.get("frozen_version") != FROZEN_VERSION:
        raise InputError(f"{path} is no {FROZEN_VERSION}", hint="make one with sembench freeze")
    manifests = value.get("manifests")
    if not isinstance(manifests, dict) or not all(isinstance(own, dict) for own in manifests.values()):
        raise InputError(f"{path}: manifests is not an object of objects", hint="freeze the manifests again")
    return manifests


def find_differences(frozen: Mapping[str, Mapping[str, Any]], folder: str) -> list[str]:
    """Return one line for each manifest that is missing or has changed."""
    lines = []
    for name, was in frozen.items():
        path = Path(folder) / name
        if not path.is_file():
            lines.append(f"{name} is missing")
            continue
        checksum = hash_file(path)
        if checksum != was.get("sha256"):
            lines.append(f"{name} has the SHA-256 {checksum[:12]}…, frozen was {str(was.get('sha256'))[:12]}…")
    return lines
