"""Whether a large file is still the one that was fetched, without reading it every time."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path


def has_digest(path: Path, sha256: str) -> bool:
    """Whether the file's bytes have this SHA-256 (in hex).

    A stamp beside the file keeps what the file system said of it when it was last hashed. While that is unchanged the
    file is not read again: whoever changes it can set back its size and its time, but not the time at which its status
    changed.
    """
    stamp, known = path.with_name(f"{path.name}.checked"), _describe_file(path, sha256)
    with suppress(OSError, ValueError):
        if json.loads(stamp.read_text(encoding="utf-8")) == known:
            return True
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            return False
    with suppress(OSError):  # a folder that we may not write to: hashed again next time
        stamp.write_text(json.dumps(known), encoding="utf-8")
    return True


def _describe_file(path: Path, sha256: str) -> dict[str, int | str]:
    status = path.stat()
    return {
        "sha256": sha256,
        "size": status.st_size,
        "inode": status.st_ino,
        "modified_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
    }
