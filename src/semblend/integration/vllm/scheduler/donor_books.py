"""Which donors the workers hold, which are on their way, and which they shall drop."""

from __future__ import annotations

from collections.abc import Callable

from semblend.discover.donor import Eviction
from semblend.errors import SemBlendError
from semblend.facade import SemBlend
from semblend.prompt import Prompt

ReportFailure = Callable[[str, str, str], None]


class DonorBooks:
    """A donor can be found from the moment on that every rank has its KV, until the first rank lets it go."""

    def __init__(self, semblend: SemBlend, report_failure: ReportFailure) -> None:
        self._semblend, self._report_failure = semblend, report_failure
        self.epoch = 0  # moves when donors come or go: a decline from before may be wrong by now
        self._generations = 0
        self._on_the_way: dict[tuple[str, int], Prompt] = {}  # ordered, not reported yet
        self._held: dict[str, int] = {}  # donor -> the workers' generation of it
        self._drops: list[tuple[str, int]] = []
        semblend.on_evicted(self._note_evicted)

    def holds(self, donor_id: str) -> bool:
        return donor_id in self._held

    def find_generation(self, donor_id: str) -> int:
        """The workers' generation of a donor; -1, which no worker has, where they do not hold it."""
        return self._held.get(donor_id, -1)

    def order(self, donor_id: str, prompt: Prompt) -> int:
        """A capture is ordered; returns its generation."""
        self._generations += 1
        self._on_the_way[donor_id, self._generations] = prompt
        return self._generations

    def note_captured(self, donor_id: str, generation: int) -> None:
        """Every rank holds its KV: only now can it be found."""
        prompt = self._on_the_way.pop((donor_id, generation), None)
        if prompt is None:  # reset meanwhile
            self._drops.append((donor_id, generation))
            return
        try:
            self._semblend.register(prompt, donor_id)
        except SemBlendError as error:
            self._drops.append((donor_id, generation))
            self._report_failure("capture", str(error), donor_id)
            return
        self._held[donor_id] = generation
        self.epoch += 1

    def note_not_captured(self, donor_id: str, generation: int) -> None:
        self._on_the_way.pop((donor_id, generation), None)
        self._drops.append((donor_id, generation))  # another rank may have it

    def note_lost(self, donor_id: str, generation: int) -> None:
        """A rank let it go; the others hear of it by the drops."""
        if self._held.get(donor_id) == generation:
            self._semblend.forget(donor_id, reason="engine")

    def forget_all(self) -> None:
        self._on_the_way.clear()
        self._semblend.clear()

    def take_drops(self) -> list[tuple[str, int]]:
        drops, self._drops = self._drops, []
        return drops

    def _note_evicted(self, eviction: Eviction) -> None:
        generation = self._held.pop(eviction.donor.donor_id, None)
        self.epoch += 1
        if generation is not None:
            self._drops.append((eviction.donor.donor_id, generation))
