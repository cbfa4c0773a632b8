"""Which donors the workers hold, which are on their way, and which they shall drop."""

from __future__ import annotations

from collections.abc import Callable

from semblend.discover.donor import Eviction
from semblend.errors import SemBlendError
from semblend.facade import SemBlend
from semblend.integration.vllm.orders import Capture
from semblend.integration.vllm.scheduler.admin_desk import AdminDesk
from semblend.integration.vllm.scheduler.records import Record
from semblend.integration.vllm.scheduler.reset_watch import ResetWatch
from semblend.prompt import Prompt

ReportFailure = Callable[[str, str, str], None]


class DonorBooks:
    """A donor can be found from the moment on that every rank has its KV, until the first rank lets it go.

    ``resets`` looks whether vLLM has emptied its prefix cache; ``desk`` holds what an operator asks for.
    """

    def __init__(self, semblend: SemBlend, report_failure: ReportFailure) -> None:
        self._semblend, self._report_failure = semblend, report_failure
        self.epoch = 0  # moves when donors come or go: a decline from before may be wrong by now
        self._generations = 0
        self._on_the_way: dict[tuple[str, int], Prompt] = {}  # ordered, not reported yet
        self._held: dict[str, int] = {}  # donor -> the workers' generation of it
        self._drops: list[tuple[str, int]] = []
        self._pinned: set[str] = set()
        self._pins: list[tuple[str, int, bool]] = []  # for the workers: donor, generation, on or off
        self.resets: ResetWatch | None = None
        self.desk: AdminDesk | None = None
        semblend.on_evicted(self._note_evicted)

    def holds(self, donor_id: str) -> bool:
        return donor_id in self._held

    def find_generation(self, donor_id: str) -> int:
        """The workers' generation of a donor; -1, which no worker has, where they do not hold it."""
        return self._held.get(donor_id, -1)

    def order(self, record: Record, block_tokens: int) -> Capture:
        """Order the capture of what is exact in a request's prompt."""
        assert record.block_ids is not None, "it was computed in these blocks"
        tokens, prompt, donor_id = record.exact_end, record.prompt, record.request.request_id
        self._generations += 1
        kept = prompt if tokens == len(prompt) else Prompt(prompt.token_ids[:tokens], namespace=prompt.namespace)
        self._on_the_way[donor_id, self._generations] = kept
        record.captured = True
        return Capture(donor_id, self._generations, tokens, tuple(record.block_ids[: -(-tokens // block_tokens)]))

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

    def catch_up(self) -> bool:
        """Do what an operator has asked for since the last call; whether all donors are void by now."""
        if self.desk is not None:
            self.desk.work_off()
        return self.resets is not None and self.resets.was_reset()

    def act(self, action: str, donor_id: str) -> bool:
        """Do one of an operator's actions to a donor; False where that changes nothing."""
        if action == "forget":
            return self._semblend.forget(donor_id)
        pins = action == "pin"
        if pins == (donor_id in self._pinned) or (pins and not self._semblend.pin(donor_id)):
            return False
        if pins:
            self._pinned.add(donor_id)
        else:
            self._pinned.discard(donor_id)
            self._semblend.unpin(donor_id)
        self._pins.append((donor_id, self.find_generation(donor_id), pins))
        return True

    def name_anew(self, name: Callable[[Prompt], Prompt]) -> None:
        """Donors on their way get another namespace."""
        self._on_the_way = {key: name(prompt) for key, prompt in self._on_the_way.items()}

    def forget_all(self) -> None:
        self._on_the_way.clear()
        self._semblend.clear()

    def take_drops(self) -> list[tuple[str, int]]:
        drops, self._drops = self._drops, []
        return drops

    def take_pins(self) -> list[tuple[str, int, bool]]:
        pins, self._pins = self._pins, []
        return pins

    def _note_evicted(self, eviction: Eviction) -> None:
        self._pinned.discard(eviction.donor.donor_id)
        generation = self._held.pop(eviction.donor.donor_id, None)
        self.epoch += 1
        if generation is not None:
            self._drops.append((eviction.donor.donor_id, generation))
