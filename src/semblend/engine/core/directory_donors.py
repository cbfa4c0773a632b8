"""The embedded engine's side of the donor directory: it takes in what others have published, and publishes its own.

Called by the engine's thread alone, but for `Publisher`, which writes files in a thread of its own. A directory that
cannot be read or written any more costs its donors, and nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from semblend.discover.donor import Eviction
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.weights import Weights
from semblend.errors import SemBlendError
from semblend.facade import SemBlend
from semblend.materialize.donors.directory import GENERATION, SharedDonors, is_key
from semblend.materialize.donors.directory_kv import DirectoryKv, KvSignature, Publisher
from semblend.materialize.donors.store import PrivateFolder
from semblend.plan.reuse_plan import ReusePlan
from semblend.prompt import Prompt

log = logging.getLogger("semblend.engine")
STRETCH, STRETCHES = 64, 8
"""Numbers in a row that are read of every weight, and how many such rows."""
LAYOUT = "semblend-1"
"""Names how this engine lays weights and KV out. Another engine's digest of the same model is another one."""


class DirectoryDonors:
    """Donors that this engine and its neighbours share; `look_around` before a lookup, `publish` after a capture."""

    def __init__(self, semblend: SemBlend, shared: SharedDonors, kv: DirectoryKv, publisher: Publisher) -> None:
        self.publisher = publisher
        self.kv = kv
        self._semblend, self._shared = semblend, shared
        self._shown: set[str] = set()
        self._given_up = False
        semblend.on_evicted(self._note_evicted)

    def look_around(self) -> None:
        """Take in what neighbours have published, and let go of what is gone; cheap, see `DirectoryWatch`."""
        if self._given_up:
            return
        try:
            changes = self._shared.poll()
        except OSError as error:
            self._give_up(error)
            return
        for key in changes.went:
            if key in self._shown:
                self._semblend.forget(key, reason="engine")
        for record in changes.came:
            try:
                self._semblend.register(record.prompt, record.key, ttl_s=record.count_ttl_s(time.time()))
            except SemBlendError as error:
                log.warning("published donor %s is refused: %s", record.key, error)
                self._shared.refuse(record.key)
                continue
            self._shown.add(record.key)

    def take_in_all(self) -> None:
        """At a start: everything that lies in the folder, so that the first question finds it."""
        self.look_around()
        while not self._given_up and not self._shared.is_settled:
            self._shared.flush()
            self.look_around()

    def name_generations(self, plan: ReusePlan) -> ReusePlan:
        """The plan with the generation by which the KV of published donors is known; they are used now."""
        for donor_id in plan.donor_ids:
            self._shared.touch(donor_id)
        spans = tuple(
            replace(span, generation=GENERATION) if span.donor_id in self._shown else span for span in plan.spans
        )
        return replace(plan, spans=spans)

    def may_keep(self, donor_id: str) -> bool:
        """Whether an own donor may have this id: one that looks like a key could take a published donor's place."""
        return not is_key(donor_id)

    def publish(self, donor_id: str, generation: int, prompt: Prompt) -> None:
        """Let the others find a donor that was captured; returns before its file is written."""
        if self._given_up or self._shared.has_published(donor_id):
            return
        try:
            publication = self._shared.publish(donor_id, generation, prompt)
        except OSError as error:
            self._give_up(error)
            return
        if publication is not None and not self.publisher.submit(publication):
            self._shared.take_back(donor_id)

    def has_published(self, donor_id: str) -> bool:
        """Whether others will find a donor of this engine once the publisher has written its file."""
        return not self._given_up and self._shared.has_published(donor_id)

    def forget_all(self, clear: Callable[[], int]) -> int:
        """Every donor goes from this engine: its own leave the directory, the neighbours' are not looked at again."""
        forgotten = 0

        def count() -> None:
            nonlocal forgotten
            forgotten = clear()

        self._shared.reset(count)
        return forgotten

    def close(self) -> None:
        """Finish the files that wait. Donors stay for the neighbours and for the next start."""
        self.publisher.flush()
        self.publisher.close()
        self.kv.close()
        self._shared.close()
        self._given_up = True

    def _give_up(self, error: OSError) -> None:
        log.warning("the donor directory is given up: %s", error)
        self._given_up = True

    def _note_evicted(self, eviction: Eviction) -> None:
        self._shown.discard(eviction.donor.donor_id)
        if not self._given_up:
            self._shared.note_eviction(eviction.donor.donor_id, eviction.reason)


def open_directory(path: str, model: DecoderModel, *, bits: int = 16) -> DirectoryKv:
    """The KV files in ``path`` that this model can use; raises StoreError where the folder cannot be had."""
    spec = model.spec
    signature = KvSignature(
        weights=digest_weights(model.weights),
        dtype=str(model.dtype).removeprefix("torch."),
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        bits=bits,
        rope=spec.rope,
    )
    return DirectoryKv(PrivateFolder(path), signature)


def digest_weights(weights: Weights) -> str:
    """16 hex digits of some numbers of every weight: two folders of one name may hold other weights.

    The same numbers in another type or layout have another digest, as they give other KV.
    """
    digest = hashlib.sha256(LAYOUT.encode())
    tensors: list[Tensor] = [weights.embedding, weights.norm, weights.head]
    for layer in weights.layers:
        tensors += [one for f in fields(layer) if (one := getattr(layer, f.name)) is not None]
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        size = min(STRETCH, flat.numel())
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        for part in range(1, STRETCHES + 1):
            start = (flat.numel() - size) * part // STRETCHES
            digest.update(flat[start : start + size].contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
