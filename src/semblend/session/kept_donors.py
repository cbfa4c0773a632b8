"""The donors of an engine: their KV in memory of our own, and what the library knows of them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from semblend.discover.donor import Eviction
from semblend.errors import CapacityError
from semblend.facade import SemBlend
from semblend.materialize.contract import Model
from semblend.materialize.donors.tiers import DonorKv
from semblend.plan.reuse_plan import ReusePlan
from semblend.prompt import Prompt
from semblend.reporting import report_policy_failure
from semblend.session.settings import LocalSettings

log = logging.getLogger("semblend.session")


class KeptDonors:
    """``epoch`` counts changes: a decision of an earlier epoch may name donors that are gone, or miss new ones."""

    def __init__(self, semblend: SemBlend, model: Model, settings: LocalSettings, engine: str) -> None:
        self._semblend, self._model, self._engine = semblend, model, engine
        self.kv = DonorKv(
            settings.donor_device_bytes,
            settings.donor_host_bytes,
            on_evicted=self._note_lost,
            device_type=model.device.type,
            rope=model.rope,
            eviction=settings.config.eviction,
            on_policy_failure=partial(report_policy_failure, semblend.events),
        )
        self.generations: dict[str, int] = {}
        self._adopted: dict[tuple[str, bytes], str] = {}
        self._made, self.epoch = 0, 0
        self.on_kept: Callable[[str, Prompt], None] | None = None  # told of every new donor
        for donor in semblend.donors():  # a store file brings back donors, not their KV
            semblend.forget(donor.donor_id, reason="engine")
        semblend.on_evicted(self._note_evicted)

    def keep(self, prompt: Prompt, slots: Tensor) -> str | None:
        """Copy KV and make it a donor; None where there is no room for it.

        Its name is ours: a caller chooses request ids, and must not replace donors.
        """
        self._made += 1
        donor_id = f"{self._engine}-{self._made}"
        try:
            handle = self.kv.capture(donor_id, self._made, self._model.layout, slots)
            if handle.arrives is not None:
                handle.arrives.wait()
            self.generations[donor_id] = self._made
            self._semblend.register(prompt, donor_id)
        except CapacityError as error:
            self.generations.pop(donor_id, None)
            log.debug("SemBlend keeps no donor of %d tokens: %s", len(prompt), error)
            return None
        self.epoch += 1
        if self.on_kept is not None:
            self.on_kept(donor_id, prompt)
        return donor_id

    def adopt(self, prompt: Prompt, slots: Tensor) -> bool:
        """Make a donor of KV that somebody else proposes; False where it is one already, or finds no room."""
        known = (prompt.namespace.digest, hashlib.sha256(prompt.token_ids.tobytes()).digest())
        if self._adopted.get(known) in self.generations:
            return False
        self._adopted = {key: donor for key, donor in self._adopted.items() if donor in self.generations}
        donor_id = self.keep(prompt, slots)
        if donor_id is not None:
            self._adopted[known] = donor_id
        return donor_id is not None

    def name_generations(self, plan: ReusePlan) -> ReusePlan:
        """The plan with the generations of our KV, where the library has its own; -1 for a donor that is gone."""
        spans = tuple(replace(span, generation=self.generations.get(span.donor_id, -1)) for span in plan.spans)
        return replace(plan, spans=spans)

    def look_around(self) -> None:
        """Nobody publishes to these engines."""

    def list_missing(self, plan: ReusePlan) -> list[str]:
        return [donor_id for donor_id in plan.donor_ids if donor_id not in self.generations]

    def drop_all(self) -> None:
        """Nothing of what was kept is true any more."""
        self.epoch += 1
        self._semblend.clear()
        self.kv.drop_all()
        self.generations.clear()
        self._adopted.clear()

    def _note_lost(self, donor_id: str, generation: int, reason: str) -> None:
        log.debug("donor %s left memory: %s", donor_id, reason)
        if self.generations.get(donor_id) == generation:
            self._semblend.forget(donor_id, reason="engine")

    def _note_evicted(self, eviction: Eviction) -> None:
        self.generations.pop(eviction.donor.donor_id, None)
        self.kv.drop(eviction.donor.donor_id)
        self.epoch += 1
