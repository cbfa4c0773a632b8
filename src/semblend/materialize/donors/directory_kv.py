"""The KV of published donors, on one rank: it writes the files of its engine and maps those of the others.

A file is verified before it is first used: its name, its header, whose prompt it holds, whether it fits this model and
rank, and every byte of it. That reads the file once, so `verify_ahead` does it in a thread of its own as donors come,
and a request finds it done. Afterwards a file is known by its inode, size and times; one that changed is verified anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from semblend.errors import SemBlendError, StoreError
from semblend.materialize.donors.background import MAX_WAITING, Background
from semblend.materialize.donors.directory import (
    GENERATION,
    LARGEST_RECORD,
    DirectoryListing,
    DonorRecord,
    Lease,
    Publication,
    is_key,
    kv_name,
    record_name,
    withdrawn_name,
)
from semblend.materialize.donors.store import (
    PrivateFolder,
    map_tensors,
    pack_rope,
    read_header,
    read_payload,
    unpack_rope,
    write_donor_file,
)
from semblend.materialize.kv.moves import DonorTensors
from semblend.materialize.kv.rope import RopeSpec

# -- What must be equal for KV of one engine to be KV of another.


@dataclass(frozen=True, slots=True)
class KvSignature:
    """``weights`` is a digest of the loaded model: its name is not enough. ``kv_heads`` are those of one rank.

    Two folders with one name may hold other weights, and a folder may be written anew between two starts.
    """

    weights: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    bits: int
    rope: RopeSpec | None
    rank: int = 0
    ranks: int = 1

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


log = logging.getLogger("semblend.donors")


class DirectoryKv:
    """Writes and maps the KV files of rank ``signature.rank``. Thread-safe."""

    def __init__(self, folder: PrivateFolder, signature: KvSignature) -> None:
        self.signature = signature
        self._folder, self._listing = folder, DirectoryListing(folder)
        self._leases: dict[str, Lease] = {}
        self._verified: dict[str, tuple[int, ...]] = {}
        self._unusable: set[str] = set()
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def name_weights(self, digest: str) -> None:
        """The model has other weights from now on."""
        with self._lock:
            self.signature = replace(self.signature, weights=digest)
            self._unusable.clear()

    def write(self, key: str, tokens_digest: str, parts: Mapping[str, Tensor], rope: RopeSpec | None) -> int:
        """Write this rank's file of a donor of this engine; returns its size. Raises OSError, or StoreError when the
        writer of ``key`` is dead: its donors belong to somebody else then."""
        self._join(key.partition("-")[0])
        about = {
            "key": key,
            "rank": self.signature.rank,
            "ranks": self.signature.ranks,
            "signature": self.signature.digest,
            "tokens_digest": tokens_digest,
            "rope": pack_rope(rope),
        }
        name = kv_name(key, self.signature.rank, self.signature.ranks)
        return self._folder.write(name, lambda out: write_donor_file(out, parts, about))

    def open(self, key: str) -> DonorTensors:
        """The donor's KV, mapped; raises StoreError when it is gone, does not fit or is damaged.

        What is damaged is withdrawn, so that nobody else tries.
        """
        found = self._try_to_open(key, verifies=True)
        assert found is not None, "verified by now"
        return found

    def open_verified(self, key: str) -> DonorTensors | None:
        """The same for a donor that was verified before; None for others, of which only the header is read."""
        return self._try_to_open(key, verifies=False)

    def _try_to_open(self, key: str, *, verifies: bool) -> DonorTensors | None:
        try:
            return self._open(key, verifies)
        except FileNotFoundError:
            raise StoreError(f"published donor {key} is gone", hint="it was evicted by its owner") from None
        except (PermissionError, ValueError, KeyError, TypeError, RuntimeError) as error:
            log.warning("published donor %s is set aside: %s", key, error)
            self._folder.rename(record_name(key), withdrawn_name(key))
            raise StoreError(f"published donor {key} is damaged: {error}", hint="it is set aside") from None
        except OSError as error:  # no memory or descriptors here, or a disk that fails: no verdict over the donor
            raise StoreError(f"published donor {key} cannot be read: {error}", hint="it is left out") from None

    def can_use(self, key: str) -> bool:
        """Whether a donor's KV is of these weights, this type and these bits; its bytes are not verified."""
        try:
            descriptor = self._folder.open(kv_name(key, self.signature.rank, self.signature.ranks))
            try:
                self._check_fits(key, read_header(descriptor)["about"])
            finally:
                os.close(descriptor)
        except (OSError, StoreError, ValueError, KeyError, TypeError):
            return False
        return True

    def verify_ahead(self, every_s: float = 1.0) -> None:
        """Verify donors of other writers as they come, in a daemon thread, until `close`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._verify_all, args=(every_s,), daemon=True, name="donor-verify")
            self._thread.start()

    def close(self) -> None:
        """Ends the thread and lets go of the leases; what was handed out stays readable."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for lease in self._leases.values():
                lease.close()
            self._leases.clear()

    # -- parts -----------------------------------------------------------------------------------------------------

    def _join(self, writer: str) -> None:
        with self._lock:
            if writer in self._leases:
                return
            lease = Lease.join(self._folder, writer)
            if lease is None:
                raise StoreError(f"writer {writer} of the donor directory is gone", hint="restart the engine")
            self._leases[writer] = lease

    def _open(self, key: str, verifies: bool) -> DonorTensors | None:
        name = kv_name(key, self.signature.rank, self.signature.ranks)
        descriptor = self._folder.open(name)
        try:
            header = read_header(descriptor)
            self._check_fits(key, header["about"])
            identity = _identify(descriptor)
            with self._lock:
                verified = self._verified.get(key) == identity
            if not verified and not verifies:
                return None
            if not verified:
                self._check_record(key, header["about"])
                read_payload(descriptor, header)
            parts = map_tensors(descriptor, header)
            with self._lock:
                self._verified[key] = identity
        finally:
            os.close(descriptor)
        rope = unpack_rope(header["about"]["rope"])
        return DonorTensors.of_parts(_check_parts(parts, self.signature), key, GENERATION, rope)

    def _check_fits(self, key: str, about: Mapping[str, Any]) -> None:
        if about["key"] != key or (about["rank"], about["ranks"]) != (self.signature.rank, self.signature.ranks):
            raise ValueError("it holds another donor, or another rank's part")
        if about["signature"] != self.signature.digest:
            # Whole, and of use to others: of other weights, another type or other bits.
            with self._lock:
                self._unusable.add(key)
            raise StoreError(f"published donor {key} is of another model or type", hint="it is left to others")

    def _check_record(self, key: str, about: Mapping[str, Any]) -> None:
        record = DonorRecord.decode(self._folder.read(record_name(key), LARGEST_RECORD), key)
        if record.tokens_digest != about["tokens_digest"]:
            raise ValueError("its KV is of another prompt than its record")

    def _verify_all(self, every_s: float) -> None:
        while not self._ends.is_set():
            try:
                self.verify_new()
            except OSError as error:  # a folder that went away; requests will find out too
                log.warning("the donor directory cannot be listed: %s", error)
            self._ends.wait(every_s)

    def verify_new(self) -> int:
        """Verify what is complete and was not looked at yet, own donors left out; returns how many were right."""
        there = self._listing.refresh().list_complete(self.signature.ranks)
        with self._lock:
            self._verified = {key: known for key, known in self._verified.items() if key in there}
            self._unusable &= there
            mine = set(self._leases)
            new = sorted(there - self._verified.keys() - self._unusable)
        right = 0
        for key in new:
            if self._ends.is_set():
                break
            if key.partition("-")[0] in mine:
                continue
            try:
                self.open(key)
                right += 1
            except StoreError as error:  # whoever wants it tries again; this thread does not
                log.debug("%s", error)
                with self._lock:
                    self._unusable.add(key)
        return right


class PublishedDonors:
    """Donors of the directory that are held at the moment; each is mapped once, however many hold it. Thread-safe."""

    def __init__(self, directory: DirectoryKv) -> None:
        self.directory = directory
        self._held: dict[str, tuple[DonorTensors, int]] = {}
        self._rising: set[str] = set()
        self._failed: dict[str, StoreError] = {}  # told to who asks next
        self._lock = threading.Lock()

    @staticmethod
    def names(donor_id: str, generation: int) -> bool:
        """Whether a donor is one of the directory."""
        return generation == GENERATION and is_key(donor_id)

    def acquire(self, key: str, reader: Background) -> DonorTensors | None:
        """Holds a donor until `release`; raises StoreError when it cannot be used.

        None while ``reader`` verifies it: that reads all of its file, which no step waits for.
        """
        with self._lock:
            if key in self._held:
                tensors, holders = self._held[key]
                self._held[key] = tensors, holders + 1
                return tensors
            if key in self._rising:
                return None
            if (failure := self._failed.pop(key, None)) is not None:
                raise failure
        opened = self.directory.open_verified(key)
        if opened is None:
            with self._lock:
                if reader.submit(partial(self._verify, key)):
                    self._rising.add(key)
            return None
        with self._lock:
            tensors, holders = self._held.get(key, (opened, 0))
            self._held[key] = tensors, holders + 1
            return tensors

    def is_rising(self, key: str) -> bool:
        return key in self._rising

    def _verify(self, key: str) -> None:
        try:
            self.directory.open(key)
        except StoreError as error:
            self._failed[key] = error
        finally:
            self._rising.discard(key)

    def release(self, tensors: DonorTensors) -> bool:
        """Ends one hold; False when it is none of ours. The last one unmaps the file."""
        with self._lock:
            found = self._held.get(tensors.donor_id)
            if found is None or found[0] is not tensors:
                return False
            if found[1] > 1:
                self._held[tensors.donor_id] = tensors, found[1] - 1
            else:
                del self._held[tensors.donor_id]
            return True

    @property
    def holders(self) -> int:
        with self._lock:
            return sum(holders for _, holders in self._held.values())


def _identify(descriptor: int) -> tuple[int, ...]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _check_parts(parts: dict[str, Tensor], signature: KvSignature) -> dict[str, Tensor]:
    k, v = parts["k"], parts["v"]
    wanted = (signature.layers, signature.kv_heads, signature.head_dim)
    if k.shape != v.shape or k.dim() != 4 or (k.shape[0], *k.shape[2:]) != wanted:
        raise ValueError(f"keys {list(k.shape)} and values {list(v.shape)} do not fit {wanted}")
    return parts


# -- Publishes donors in a thread of its own: a step of the engine does not wait for a file.


class Publishable(Protocol):
    """What a publisher needs of `DonorKv`."""

    def publish(self, donor_id: str, generation: int, key: str, tokens_digest: str) -> int: ...


class Publisher:
    """Writes publications one after the other. A failure costs the neighbours a donor, and nothing else."""

    def __init__(self, donors: Publishable) -> None:
        self._donors, self._background = donors, Background("donor-publish")
        self.flush, self.close = self._background.flush, self._background.close
        self.last_failure: Exception | None = None

    def submit(self, publication: Publication, is_valid: Callable[[], bool] = lambda: True) -> bool:
        """Take it, or say that too many wait; never blocks. ``is_valid`` is asked when it is its turn."""
        taken = self._background.submit(partial(self._publish, publication, is_valid))
        if not taken:
            log.info("donor %s is not published: %d wait already", publication.donor_id, MAX_WAITING)
        return taken

    def _publish(self, one: Publication, is_valid: Callable[[], bool]) -> None:
        try:
            if is_valid():
                self._donors.publish(one.donor_id, one.generation, one.key, one.tokens_digest)
            else:
                log.warning("donor %s is not published: the weights have changed", one.donor_id)
        except (OSError, SemBlendError, RuntimeError, MemoryError) as error:
            self.last_failure = error
            log.warning("donor %s is not published: %s", one.donor_id, error)
