"""Pages of an exact prefix cache in a folder: whole, checksummed files that outlive the process.

An engine that spills its prefix cache names a page by a hash of all tokens up to its end, so equal names hold equal KV
as long as model, weights, shapes and ranks are the same. Those are the identity of a `PageFiles`: it is part of every
file's name and stands in every file, and a page of another identity does not exist here.

Files are those of `donor_file` in a `PrivateFolder`: written under another name and renamed, so that a crash leaves no
half page; read only when header, key, identity and every checksum are right. A damaged file is removed and was a miss.

The folder may be shared by several processes. Each counts what it has written and lists the folder when the budget
seems to be used up; the least recently used files go first, whoever wrote them. Between two listings the folder can be
larger than the budget by what the others have written. A disk with less room than the budget becomes the budget: older
pages then make room for newer ones.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semblend.materialize.donors.donor_file import map_tensors, read_header, verify_payload, write_donor_file
from semblend.materialize.donors.shared.private_folder import PART, PrivateFolder

SUFFIX = ".page"
KEPT_SHARE = 0.9
"""How much of the budget stays when files are removed: a listing costs more than a file."""

HEADER_BYTES = 512
"""What a file has besides its page and what stands about it: where the page lies, checksums, padding."""

LOST_AFTER_S = 600.0
"""A file that is not whole after this time belongs to a process that died. If it does not, its page is not stored."""

QUIET_S = 60.0
"""Of warnings that each page of a long prompt would repeat, one comes in so many seconds."""

log = logging.getLogger("semblend.pages")


class PageFiles:
    """See the module. Any thread may call any method."""

    def __init__(self, folder: str | Path, identity: Mapping[str, Any], most_bytes: int) -> None:
        self._folder, self._most_bytes = PrivateFolder(folder), most_bytes
        self._identity = json.loads(json.dumps(dict(identity), sort_keys=True))
        packed = json.dumps(self._identity, sort_keys=True).encode()
        self._prefix = hashlib.sha256(b"semblend.pages.v1:" + packed).hexdigest()[:16] + "-"
        self._lock = threading.Lock()
        self._bytes = 0
        self._quiet_until = 0.0
        self.damaged_files = 0
        self._make_room(0)

    def holds(self, key: str) -> bool:
        """Whether there is a file of this page; whether it is intact is seen when it is read."""
        try:
            return stat.S_ISREG(self._folder.stat(self._name(key)).st_mode)
        except OSError:
            return False

    def read_into(self, key: str, target: Tensor) -> bool:
        """Copy a page to ``target``, which must have as many bytes; False where it is not here, or damaged."""
        name = self._name(key)
        try:
            descriptor = self._folder.open(name)
        except OSError:
            return False
        try:
            header = read_header(descriptor)
            if header["about"] != self._describe(key):
                raise ValueError("it is another page")
            verify_payload(descriptor, header)
            page = map_tensors(descriptor, header)["page"]
            wanted = target.view(-1).view(torch.uint8)
            if page.shape != wanted.shape:
                raise ValueError(f"{page.numel()} bytes instead of {wanted.numel()}")
            wanted.copy_(page)
        except (ValueError, KeyError, TypeError, OSError) as error:
            self._remove_damaged(name, error)
            return False
        finally:
            os.close(descriptor)
        self._folder.touch(name)
        return True

    def write(self, key: str, page: Tensor) -> bool:
        """Keep a page; True where it is kept now. Raises nothing: a page that cannot be kept is computed again."""
        name = self._name(key)
        if self.holds(key):
            self._folder.touch(name)
            return True
        flat = page.detach().cpu().contiguous().view(-1).view(torch.uint8)
        if not self._reserve(flat.numel() + len(json.dumps(self._describe(key))) + HEADER_BYTES):
            return False
        try:
            size = self._folder.write(name, lambda out: write_donor_file(out, {"page": flat}, self._describe(key)))
        except OSError as error:
            self._note_failed_write(error)
            return False
        with self._lock:
            self._bytes += size
        return True

    def clear(self) -> None:
        """Remove every page of this identity."""
        for name in self._folder.list_names():
            if name.startswith(self._prefix):
                self._folder.remove(name)
        self._make_room(0)

    def close(self) -> None:
        """Safe to call twice. Pages stay."""
        self._folder.close()

    @property
    def stored_bytes(self) -> int:
        """Bytes in the folder as far as this process knows."""
        return self._bytes

    def _name(self, key: str) -> str:
        """A key is somebody else's text: its hash is a name that is safe in a folder."""
        return self._prefix + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:48] + SUFFIX

    def _describe(self, key: str) -> dict[str, Any]:
        return {"key": key, "identity": self._identity}

    def _reserve(self, nbytes: int) -> bool:
        if nbytes > self._most_bytes:
            return False
        if self._bytes + nbytes > self._most_bytes:
            self._make_room(nbytes)
        return self._bytes + nbytes <= self._most_bytes

    def _make_room(self, nbytes: int) -> None:
        """List the folder; where it holds more than the budget allows, remove what was used least recently."""
        with self._lock:
            files = self._list_files()
            held = sum(size for _, size, _ in files)
            if held + nbytes > self._most_bytes:
                for _, size, name in sorted(files):
                    if held + nbytes <= self._most_bytes * KEPT_SHARE:
                        break
                    self._folder.remove(name)
                    held -= size
            self._bytes = held

    def _note_failed_write(self, error: OSError) -> None:
        """Say it, once a minute. A full disk becomes the budget: the next pages then push out older ones."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._make_room(0)
            self._most_bytes = min(self._most_bytes, max(self._bytes, 1))
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + QUIET_S
            log.warning("a page could not be kept (%s); the folder may hold %d bytes now", error, self._most_bytes)

    def _list_files(self) -> list[tuple[int, int, str]]:
        """(time of use, bytes, name) of every page, whoever's; what a dead writer left unfinished is removed."""
        found = []
        for name in self._folder.list_names():
            with suppress(OSError):
                status = self._folder.stat(name)
                if name.endswith(SUFFIX):
                    found.append((status.st_mtime_ns, status.st_size, name))
                elif name.endswith(PART) and time.time() - status.st_mtime > LOST_AFTER_S:
                    self._folder.remove(name)
        return found

    def _remove_damaged(self, name: str, error: Exception) -> None:
        log.warning("a stored page is damaged and was removed (%s): it is computed again", error)
        self.damaged_files += 1
        self._folder.remove(name)
