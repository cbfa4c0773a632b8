"""Donor KV in files: their format, folders that only their owner may enter, the disk tier, pages of a prefix cache."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import mmap
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from semblend.errors import StoreError
from semblend.materialize.kv.layout import DTYPES
from semblend.materialize.kv.moves import Shapes
from semblend.materialize.kv.rope import RopeSpec

# -- Locks on files, which go with the process that has them. Without POSIX, taking one fails as a full disk would.


def take_lock(descriptor: int, *, shared: bool = False, wait: bool = False) -> None:
    """Lock an open file. Raises BlockingIOError where somebody holds it, OSError where the system has no such locks."""
    try:
        import fcntl
    except ImportError:
        raise OSError(errno.ENOTSUP, "this system has no file locks, so nothing is kept on its disk") from None
    fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


# -- The file that holds a donor's tensors, in the disk tier and in the shared directory.
#
#     8 bytes    magic
#     8 bytes    length of the header, little-endian
#     32 bytes   SHA-256 of the two above and the header
#     header     JSON: what the donor is, where each tensor lies, checksums of the payload; padded with spaces
#     payload    the tensors, each at a multiple of 64 bytes; the gaps are zero and covered by the checksums
#
# Every byte is covered: a flipped bit, a short file and a file of another donor are found before a tensor is handed
# out. The payload has one CRC-32 for every 16 MiB. On an ARM Neoverse-N1 core zlib's CRC-32 was at least 1.3 times
# as fast as SHA-256 and 2.5 times as fast as BLAKE2b (decisions/donors.md). A checksum protects against damage, not
# against somebody who may write the file: that is what its mode and its folder's are for.


MAGIC = b"SBKV0002"
ALIGNMENT = 64  # tensors start at a multiple of this, so that a mapped view is aligned for every dtype
PIECE_BYTES = 16 << 20
LARGEST_HEADER = 16 << 20
_FIXED = len(MAGIC) + 8 + 32
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPES, torch.int8, torch.uint8)}
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def write_donor_file(out: BinaryIO, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> int:
    """Write the named tensors and what ``about`` says of them; returns the bytes written."""
    parts = {name: _view_bytes(tensor) for name, tensor in tensors.items()}
    layout, at = {}, 0
    for name, tensor in tensors.items():
        layout[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "at": at}
        at += _align(parts[name].nbytes)
    header = {"about": dict(about), "tensors": layout, "payload_bytes": at, "crc32": list(_sum_parts(parts.values()))}
    packed = json.dumps(header, sort_keys=True).encode()
    packed = packed.ljust(_align(_FIXED + len(packed)) - _FIXED)
    start = MAGIC + len(packed).to_bytes(8, "little")
    out.write(start + hashlib.sha256(start + packed).digest() + packed)
    for part in parts.values():
        out.write(part.data)
        out.write(bytes(_align(part.nbytes) - part.nbytes))
    return _FIXED + len(packed) + at


def read_header(descriptor: int) -> dict[str, Any]:
    """The header of an open donor file; raises ValueError when it is damaged or the file is not as long as it says."""
    fixed = os.pread(descriptor, _FIXED, 0)
    length = int.from_bytes(fixed[len(MAGIC) : len(MAGIC) + 8], "little")
    if fixed[: len(MAGIC)] != MAGIC or not 0 < length <= LARGEST_HEADER:
        raise ValueError("it does not begin as a donor file")
    packed = os.pread(descriptor, length, _FIXED)
    if len(packed) != length or hashlib.sha256(fixed[: len(MAGIC) + 8] + packed).digest() != fixed[len(MAGIC) + 8 :]:
        raise ValueError("its header is damaged")
    header: dict[str, Any] = json.loads(packed)
    wanted, found = _FIXED + length + header["payload_bytes"], os.fstat(descriptor).st_size
    if wanted != found:
        raise ValueError(f"{found} bytes instead of {wanted}")
    header["start"] = _FIXED + length
    return header


def read_payload(
    descriptor: int, header: Mapping[str, Any], take: Callable[[int, memoryview], object] = lambda *_: None
) -> None:
    """Read the payload once; raises ValueError where a checksum is wrong, OSError where a disk cannot read it.

    ``take`` is given each piece with its place, before its checksum is compared: nothing of it counts before the end.
    By reads and not through the map: a map answers a bad sector with a signal that ends the process.
    """
    at, end = header["start"], header["start"] + header["payload_bytes"]
    buffer = bytearray(min(PIECE_BYTES, end - at))
    found = []
    while at < end:
        piece = memoryview(buffer)[: min(PIECE_BYTES, end - at)]
        got = 0
        while got < len(piece):
            step = os.preadv(descriptor, [piece[got:]], at + got)
            if not step:
                raise ValueError("it ends too early")
            got += step
        found.append(zlib.crc32(piece))
        take(at - header["start"], piece)
        at += got
    if found != header["crc32"]:
        raise ValueError("its checksum is wrong")


def map_tensors(descriptor: int, header: Mapping[str, Any]) -> dict[str, Tensor]:
    """Views of the mapped file by name. Verify it first: nothing is checked here.

    The map is private: torch wants writable memory, and a stray write must not reach the file. It lives as long as a
    tensor does, also after the file was unlinked and the descriptor closed.
    """
    if not header["payload_bytes"]:
        raise ValueError("it holds no tensors")
    mapped = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), np.uint8)
    payload = mapped[header["start"] : header["start"] + header["payload_bytes"]]
    return {name: _view_tensor(payload, about) for name, about in header["tensors"].items()}


def load_tensors(descriptor: int, about: Mapping[str, Any]) -> dict[str, Tensor]:
    """Map an open donor file that holds what ``about`` says and whose checksums are right, and close it.

    Raises ValueError, KeyError or TypeError where it is damaged or another's, OSError where it cannot be read.
    """
    try:
        header = read_header(descriptor)
        if header["about"] != about:
            raise ValueError("it holds something else")
        read_payload(descriptor, header)
        return map_tensors(descriptor, header)
    finally:
        os.close(descriptor)


def read_tensors(
    descriptor: int, about: Mapping[str, Any], take: Callable[[Shapes], dict[str, Tensor] | None]
) -> dict[str, Tensor] | None:
    """Read an open donor file as `load_tensors` does, into memory that ``take`` makes; None where it makes none."""
    try:
        header = read_header(descriptor)
        if header["about"] != about:
            raise ValueError("it holds something else")
        layout = header["tensors"]
        made = take({name: (tuple(one["shape"]), _DTYPES[one["dtype"]]) for name, one in layout.items()})
        if made is None:
            return None
        read = {
            name: one if one.device.type == "cpu" else torch.empty_like(one, device="cpu") for name, one in made.items()
        }
        targets = [(layout[name]["at"], _view_bytes(one)) for name, one in read.items()]

        def copy(at: int, piece: memoryview) -> None:
            content = np.frombuffer(piece, np.uint8)
            for start, target in targets:
                first, end = max(at, start), min(at + len(content), start + target.nbytes)
                if first < end:
                    target[first - start : end - start] = content[first - at : end - at]

        read_payload(descriptor, header, copy)
        for name, one in made.items():
            if one is not read[name]:
                one.copy_(read[name])
        return made
    finally:
        os.close(descriptor)


def pack_rope(rope: RopeSpec | None) -> dict[str, Any] | None:
    """A rotation as JSON; floats come back bit for bit. What most models do not have is left out."""
    if rope is None:
        return None
    return {name: value for name, value in asdict(rope).items() if name != "sizes" or value}


def unpack_rope(packed: Mapping[str, Any] | None) -> RopeSpec | None:
    """What `pack_rope` was given."""
    if packed is None:
        return None
    others = tuple(tuple(inv_freq) for inv_freq in packed.get("others", ()))
    named = {name: tuple(packed.get(name, ())) for name in ("inv_freq", "layer_kinds", "sizes")}
    return RopeSpec(**{**packed, **named, "others": others})


def _view_tensor(payload: Bytes, about: Mapping[str, Any]) -> Tensor:
    dtype = _DTYPES[about["dtype"]]
    nbytes = math.prod(about["shape"]) * dtype.itemsize
    piece = payload[about["at"] : about["at"] + nbytes]
    return torch.from_numpy(piece).view(dtype).view(about["shape"])


def _view_bytes(tensor: Tensor) -> Bytes:
    flat: Bytes = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return flat


def _sum_parts(parts: Iterable[Bytes]) -> Iterator[int]:
    """A CRC-32 for every 16 MiB of the parts with their padding, without joining them in memory."""
    value, room = 0, PIECE_BYTES
    for part in parts:
        for run in (part, np.zeros(_align(part.nbytes) - part.nbytes, np.uint8)):
            at = 0
            while at < len(run):
                step = min(room, len(run) - at)
                value, room, at = zlib.crc32(run[at : at + step].data, value), room - step, at + step
                if not room:
                    yield value
                    value, room = 0, PIECE_BYTES
    if room < PIECE_BYTES:
        yield value


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# -- A folder that only its owner may enter, and its files: whole or absent, never followed through a link.
#
# Everything goes through a descriptor of the folder, so that renaming it under us changes nothing. A file is written
# under a temporary name and renamed when it is whole: who opens a name finds all of it. Nothing is flushed to a disk:
# after a kill of the process the kernel still has it, after a power cut its checksum is wrong.


PART = ".part"
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class PrivateFolder:
    """The folder at ``path``, made with mode 0700 where it is missing; raises StoreError when others may enter it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        try:
            with suppress(FileExistsError):
                os.makedirs(self.path.parent, exist_ok=True)
                os.mkdir(self.path, 0o700)
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | _NO_LINKS)
        except OSError as error:
            raise StoreError(
                f"the donor directory {self.path} cannot be used: {error.strerror}",
                hint="name a folder of your own, not a link to one",
            ) from None
        try:
            self._check_owner()
        except StoreError:
            self.close()
            raise

    def _check_owner(self) -> None:
        status = os.fstat(self._descriptor)
        if status.st_uid != os.geteuid():
            raise StoreError(
                f"the donor directory {self.path} belongs to user {status.st_uid}",
                hint="name a folder of the user that runs the engine",
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise StoreError(
                f"the donor directory {self.path} has mode {stat.S_IMODE(status.st_mode):04o}: others may read prompts",
                hint=f"chmod 700 {self.path}",
            )

    def hold(self) -> bool:
        """Hold the folder until it is closed or the process ends; False where somebody else holds it."""
        try:
            take_lock(self._descriptor)
        except BlockingIOError:
            return False
        return True

    @property
    def changed_ns(self) -> int:
        """When a name was last added or removed."""
        return os.fstat(self._descriptor).st_mtime_ns

    def list_names(self) -> list[str]:
        """All names, in no order."""
        return os.listdir(self._descriptor)

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> int:
        """Make the file ``name`` with what ``fill`` writes; returns its size. Raises OSError and leaves nothing."""
        temporary = f"{name}.{secrets.token_hex(4)}{PART}"
        descriptor = self._create(temporary)
        try:
            with os.fdopen(descriptor, "wb") as out:
                fill(out)
                size = out.tell()
            os.rename(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            self.remove(temporary)
            raise
        return size

    def create(self, name: str, prepare: Callable[[int], object]) -> int:
        """Make an empty file, hand its descriptor to ``prepare``, then give it its name; returns the descriptor."""
        temporary = f"{name}.{secrets.token_hex(4)}{PART}"
        descriptor = self._create(temporary)
        try:
            prepare(descriptor)
            os.rename(temporary, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            os.close(descriptor)
            self.remove(temporary)
            raise
        return descriptor

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor of a plain file of ours that nobody else may read; raises OSError for anything else."""
        descriptor = os.open(name, flags | _NO_LINKS | os.O_NONBLOCK, dir_fd=self._descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            os.close(descriptor)
            raise PermissionError(f"{name} is not a private file of this user")
        return descriptor

    def read(self, name: str, most: int) -> bytes:
        """A small file; raises OSError where it is missing, foreign or larger than ``most``."""
        with os.fdopen(self.open(name), "rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise OSError(f"{name} is larger than {most} bytes")
        return content

    def stat(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)

    def touch(self, name: str) -> None:
        """Make a file the most recently used; one that is gone stays gone."""
        with suppress(OSError):
            os.utime(name, dir_fd=self._descriptor, follow_symlinks=False)

    def rename(self, name: str, new: str) -> None:
        with suppress(FileNotFoundError):
            os.rename(name, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def remove(self, name: str) -> None:
        """Unlink a file; who has it mapped keeps its bytes. Missing is fine, and so is what is no file."""
        with suppress(OSError):
            os.unlink(name, dir_fd=self._descriptor)

    def close(self) -> None:
        """Safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _create(self, name: str) -> int:
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | _NO_LINKS
        return os.open(name, flags, 0o600, dir_fd=self._descriptor)


# -- Donor KV on disk: one file a donor, memory-mapped when it is read, and served only if its checksums are right.
#
# Files live in a folder of their own for each process, removed when the process closes it; a folder whose owner died
# (its lock is free) is removed by the next one that starts beside it. KV on disk is an overflow, not a store: what must
# survive a restart is the donor's tokens, and those are kept elsewhere.


log = logging.getLogger("semblend.donors")

_FOLDER_PREFIX = "donor-kv-"


@dataclass(frozen=True, slots=True)
class KvFile:
    """One written donor: where it is, and the bytes of its tensors."""

    path: Path
    nbytes: int


class DiskTier:
    """Writes, reads and removes donor files. One thread at a time may write; any may read and remove."""

    def __init__(self, folder: str | Path) -> None:
        parent = Path(folder).expanduser()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with _hold(parent):  # a folder whose lock is not taken yet must not look like one of a dead process
                _sweep(parent)
                self.folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent))
                self._files = PrivateFolder(self.folder)
                self._files.hold()
        except OSError as error:
            raise StoreError(
                f"donor KV cannot be kept in {parent}: {error.strerror}", hint="name a writable folder"
            ) from error
        self._serial, self._has_warned = 0, False

    def write(self, parts: Mapping[str, Tensor], about: Mapping[str, Any]) -> KvFile:
        """Writes the tensors; raises OSError (disk full, limit reached) and then leaves nothing behind."""
        self._serial += 1
        name = f"{self._serial:08d}.kv"
        self._files.write(name, lambda out: write_donor_file(out, parts, about))
        return KvFile(self.folder / name, sum(part.nbytes for part in parts.values()))

    def load(
        self, file: KvFile, about: Mapping[str, Any], take: Callable[[Shapes], dict[str, Tensor] | None]
    ) -> dict[str, Tensor] | None:
        """The tensors, read into the memory that ``take`` makes for them; None where it makes none.

        Raises StoreError when the file is not what was written.
        """
        try:
            return read_tensors(self._files.open(file.path.name), about, take)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"donor file {file.path.name} is damaged: {error}", hint="it is dropped") from error

    def remove(self, file: KvFile) -> bool:
        """Frees the space; views that are still mapped stay readable until they are let go. False where it cannot."""
        try:
            file.path.unlink(missing_ok=True)
        except OSError as error:  # a disk that went read-only: donors are dropped all the same
            if not self._has_warned:
                log.warning("donor files cannot be removed from %s: %s", self.folder, error.strerror)
            self._has_warned = True
            return False
        self._has_warned = False
        return True

    def files(self) -> frozenset[Path]:
        """Donor files that are really there."""
        return frozenset(self.folder.glob("*.kv"))

    def close(self) -> None:
        """Removes every file; safe to call twice."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._files.close()


@contextmanager
def _hold(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Lock a folder meanwhile; raises OSError where somebody else does and nobody waits, or where it is a link."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | (0 if wait else _NO_LINKS))
    try:
        take_lock(descriptor, wait=wait)
        yield
    finally:
        os.close(descriptor)


def _sweep(parent: Path) -> None:
    """Remove the folders of processes that died: nobody locks them.

    Only real folders of our own user are touched: in a folder that many may write to, somebody could plant others.
    """
    for folder in parent.glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError):  # its owner lives, or removes it now
            if os.lstat(folder).st_uid == os.geteuid():
                with _hold(folder, wait=False):
                    shutil.rmtree(folder, ignore_errors=True)


# -- Pages of an exact prefix cache in a folder: whole, checksummed files that outlive the process.
#
# An engine that spills its prefix cache names a page by a hash of all tokens up to its end, so equal names hold
# equal KV as long as model, weights, shapes and ranks are the same. Those are the identity of a `PageFiles`: it is
# part of every file's name and stands in every file, and a page of another identity does not exist here.
#
# Files are those of `donor_file` in a `PrivateFolder`: written under another name and renamed, so that a crash
# leaves no half page; read only when header, key, identity and every checksum are right. A damaged file is removed
# and was a miss.
#
# The folder may be shared by several processes. Each counts what it has written and lists the folder when the budget
# seems to be used up; the least recently used files go first, whoever wrote them. Between two listings the folder
# can be larger than the budget by what the others have written. A disk with less room than the budget becomes the
# budget: older pages then make room for newer ones.


SUFFIX = ".page"
KEPT_SHARE = 0.9
"""How much of the budget stays when files are removed: a listing costs more than a file."""

PAGE_HEADER_BYTES = 512
"""What a file has besides its page and what stands about it: where the page lies, checksums, padding."""

LOST_AFTER_S = 600.0
"""A file that is not whole after this time belongs to a process that died. If it does not, its page is not stored."""

QUIET_S = 60.0
"""Of warnings that each page of a long prompt would repeat, one comes in so many seconds."""

log_pages = logging.getLogger("semblend.pages")


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
            page = load_tensors(descriptor, self._describe(key))["page"]
            wanted = target.view(-1).view(torch.uint8)
            if page.shape != wanted.shape:
                raise ValueError(f"{page.numel()} bytes instead of {wanted.numel()}")
            wanted.copy_(page)
        except (ValueError, KeyError, TypeError, OSError) as error:
            self._remove_damaged(name, error)
            return False
        self._folder.touch(name)
        return True

    def write(self, key: str, page: Tensor) -> bool:
        """Keep a page; True where it is kept now. Raises nothing: a page that cannot be kept is computed again."""
        name = self._name(key)
        if self.holds(key):
            self._folder.touch(name)
            return True
        flat = page.detach().cpu().contiguous().view(-1).view(torch.uint8)
        if not self._reserve(flat.numel() + len(json.dumps(self._describe(key))) + PAGE_HEADER_BYTES):
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
            log_pages.warning(
                "a page could not be kept (%s); the folder may hold %d bytes now", error, self._most_bytes
            )

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
        log_pages.warning("a stored page is damaged and was removed (%s): it is computed again", error)
        self.damaged_files += 1
        self._folder.remove(name)
