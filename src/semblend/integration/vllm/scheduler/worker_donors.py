"""Which donors the workers hold, which are on their way, and which they shall drop; what neighbours have published."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any, TypeVar

import numpy as np

from semblend.discover.donor import ANSWERED, Eviction
from semblend.errors import SemBlendError
from semblend.facade import SemBlend
from semblend.integration.vllm.orders import Capture, Report
from semblend.integration.vllm.scheduler.admin import DonorAdmin
from semblend.integration.vllm.scheduler.records import EngineFacts, Record
from semblend.materialize.donors.directory import GENERATION, Publication, SharedDonors
from semblend.plan.reuse_plan import ReusePlan
from semblend.prompt import Namespace, Prompt
from semblend.session.lineage import Lineage
from semblend.session.session import ReuseSession
from semblend.session.sessions import NEW_PART

ReportFailure = Callable[[str, str, str], None]
Answer = TypeVar("Answer")

MARK_TOKENS = 64


class HeldPrefixes:
    """How much of a prompt's beginning some donor holds, by the exact hashes of its blocks, in steps of 64 tokens.

    A hash stands for all tokens up to its block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens, self._step = block_tokens, max(1, MARK_TOKENS // block_tokens)
        self._marks: dict[tuple[str, int], list[tuple[str, bytes]]] = {}
        self._holders: dict[tuple[str, bytes], dict[tuple[str, int], None]] = {}
        self._ends: dict[tuple[str, bytes], dict[tuple[str, int], None]] = {}  # of those the ones that go no further

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, donor: tuple[str, int], namespace: str, hashes: Sequence[bytes]) -> None:
        """A donor whose full blocks have these hashes has come, or is on its way."""
        self.remove(donor)
        self._marks[donor] = [(namespace, bytes(one)) for one in hashes[self._step - 1 :: self._step]]
        for mark in self._marks[donor]:
            self._holders.setdefault(mark, {})[donor] = None
        if self._marks[donor]:
            self._ends.setdefault(self._marks[donor][-1], {})[donor] = None

    def remove(self, donor: tuple[str, int]) -> None:
        marks = self._marks.pop(donor, [])
        for table, own in ((self._holders, marks), (self._ends, marks[-1:])):
            for mark in own:
                table[mark].pop(donor, None)
                if not table[mark]:
                    del table[mark]

    def count_tokens(self, namespace: str, hashes: Sequence[bytes]) -> int:
        """Tokens at the beginning of a prompt with these hashes that one donor holds."""
        for blocks in range(len(hashes) // self._step * self._step, 0, -self._step):
            if (namespace, bytes(hashes[blocks - 1])) in self._holders:
                return blocks * self._block_tokens
        return 0

    def find_beginning(self, namespace: str, hashes: Sequence[bytes]) -> tuple[str, int] | None:
        """The longest donor that a prompt with these hashes begins with, but for the tokens behind its last mark."""
        for blocks in range(len(hashes) // self._step * self._step, 0, -self._step):
            if (ending := self._ends.get((namespace, bytes(hashes[blocks - 1])))) is not None:
                return next(reversed(ending))
        return None

    def clear(self) -> None:
        self._marks.clear()
        self._holders.clear()
        self._ends.clear()


class WorkerDonors:
    """A donor can be found from the moment on that every rank has its KV, until the first rank lets it go.

    ``resets`` looks whether vLLM has emptied its prefix cache; ``admin`` holds what an operator asks for. Donors of the
    donor directory (``shared``) are found under their keys while they are there.
    """

    def __init__(self, semblend: SemBlend, report_failure: ReportFailure, facts: EngineFacts) -> None:
        self._semblend, self._report_failure = semblend, report_failure
        self._block_tokens, self._hash_tokens = facts.block_tokens, facts.hash_block_tokens
        self.epoch = 0  # moves when donors come or go: a decline from before may be wrong by now
        self._generations = 0
        self._on_the_way: dict[tuple[str, int], Prompt] = {}  # ordered, not reported yet
        self._copied_from: dict[tuple[str, int], tuple[int, ...]] = {}  # the blocks of those
        self._unsent: list[tuple[str, int]] = []  # of those the ones that no step has told the workers yet
        self._held: dict[str, int] = {}  # donor -> the workers' generation of it
        self._prefixes = HeldPrefixes(facts.hash_block_tokens)
        self._drops: list[tuple[str, int]] = []
        self._forgotten: list[str] = []  # donors that somebody wanted gone
        self._pinned: set[str] = set()
        self._pins: list[tuple[str, int, bool]] = []  # for the workers: donor, generation, on or off
        self._heirs: list[tuple[tuple[str, int], tuple[str, int]]] = []  # for the workers: a dropped donor, its heir
        self._earlier: dict[str, list[str]] = {}  # donors that each one has superseded
        self._kept_first: list[tuple[str, int, float]] = []  # for the workers: donor, generation, how long
        self.lineage = Lineage()  # the sessions' own, once there are some
        self.resets: ResetWatch | None = None
        self.admin: DonorAdmin | None = None
        self._publications: list[Publication] = []
        self.shared: SharedDonors | None = None
        self.stands_beside_others = False  # of a MultiConnector; set before the first request
        if not semblend.config.discovery_only:
            for donor in semblend.donors():  # a store file brings back donors, not their KV
                semblend.forget(donor.donor_id, reason="engine")
        semblend.on_evicted(self._note_evicted)

    def holds(self, donor_id: str) -> bool:
        return donor_id in self._held

    def list_missing(self, plan: ReusePlan) -> list[str]:
        return [donor_id for donor_id in plan.donor_ids if donor_id not in self._held]

    def find_generation(self, donor_id: str) -> int:
        """The workers' generation of a donor; -1, which no worker has, where they do not hold it."""
        return self._held.get(donor_id, -1)

    def order(self, record: Record, tokens: int) -> Capture | None:
        """Order the capture of the first ``tokens`` of a request's prompt; None where a donor holds nearly all."""
        assert record.block_ids is not None, "it was computed in these blocks"
        if not self._is_news(record, tokens):
            return None
        prompt = record.prompt
        kept = prompt if tokens == len(prompt) else Prompt(prompt.token_ids[:tokens], namespace=prompt.namespace)
        return self._order(record, record.request_id, kept, record.block_ids, at_once=True)

    def order_answered(self, record: Record, tokens: int, block_ids: Sequence[int], *, is_last: bool) -> Capture | None:
        """Order the capture of ``tokens`` of prompt and answer, of a request that has ended and gives its blocks away.

        Under a name of its own: what was captured of the prompt is superseded where nobody needs it any more. Workers
        may refuse it while others run, so it is then published once they have it; the ``is_last`` of all at once.
        """
        if not self._is_news(record, tokens):
            return None
        asked = record.prompt.token_ids  # read once, whoever asks first: to read a long list takes longer than the rest
        answer = np.asarray(record.source.all_token_ids[len(asked) : tokens], dtype=np.int32)
        kept = Prompt(np.concatenate((asked[:tokens], answer)), namespace=record.prompt.namespace)
        return self._order(record, f"{record.request_id}{ANSWERED}", kept, block_ids, at_once=is_last)

    def _is_news(self, record: Record, tokens: int) -> bool:
        """Whether of so many tokens of a request enough are in no donor that has the same ones before them."""
        namespace, hashes = record.prompt.namespace.digest, record.source.block_hashes[: tokens // self._hash_tokens]
        return (tokens - self._prefixes.count_tokens(namespace, hashes)) * NEW_PART >= tokens

    def _order(
        self, record: Record, donor_id: str, kept: Prompt, block_ids: Sequence[int], *, at_once: bool
    ) -> Capture:
        self._generations += 1
        key, tokens = (donor_id, self._generations), len(kept)
        hashes = record.source.block_hashes[: tokens // self._hash_tokens]
        self._prefixes.add(key, kept.namespace.digest, hashes)
        self._on_the_way[key] = kept
        blocks = self._copied_from[key] = tuple(block_ids[: -(-tokens // self._block_tokens)])
        self._unsent.append(key)
        publication = self._publish_at_once(*key, kept) if at_once else None
        return Capture(*key, tokens, blocks, publication, kept.namespace.tenant)

    def _publish(self, donor_id: str, generation: int, prompt: Prompt) -> Publication | None:
        """What the workers shall put into the donor directory; None where there is none, or no room in it."""
        if self.shared is None or self.shared.has_published(donor_id):
            return None
        return self._guard(lambda shared: shared.publish(donor_id, generation, prompt))

    def _publish_at_once(self, donor_id: str, generation: int, prompt: Prompt) -> Publication | None:
        """As `_publish`, before the capture is done: an engine that has no step after this one publishes too.

        Not before the weights are known by name, and not beside others, whose loads may turn out to have failed: then a
        donor is published when its capture is reported.
        """
        named = self.shared is not None and self.shared.knows_weights and not self.stands_beside_others
        return self._publish(donor_id, generation, prompt) if named else None

    def follow(self, engine: Namespace) -> None:
        """The engine's namespace names its weights now, or names others."""
        if self.shared is not None:
            self.shared.follow(engine)

    def look_around(self) -> None:
        """Take in what neighbours have published, and let go of what they took back; cheap, see `DirectoryWatch`."""
        changes = self._guard(lambda shared: shared.poll())
        if changes is None or self.shared is None:
            return
        for key in changes.went:
            if key in self._held:
                self._semblend.forget(key, reason="engine")
        for record in changes.came:
            try:
                self._semblend.register(record.prompt, record.key, ttl_s=record.count_ttl_s(time.time()))
            except SemBlendError as error:
                self.shared.refuse(record.key)
                self._report_failure("directory", str(error), "")
                continue
            self._held[record.key] = GENERATION
            self.epoch += 1

    def take_in_all(self) -> None:
        """At a start, outside any step: everything that lies in the folder, so that the first request finds it."""
        self.look_around()
        while self.shared is not None and not self.shared.is_settled:
            self.shared.flush()
            self.look_around()

    def note_used(self, donor_ids: Iterable[str]) -> None:
        """Donors are about to be loaded."""
        if self.shared is not None:
            for donor_id in donor_ids:
                self.shared.touch(donor_id)

    def note_sent(self) -> None:
        """The workers hear of all that was ordered with this step."""
        self._unsent = []

    def take_back_unsent(self) -> None:
        """They never hear of it."""
        unsent, self._unsent = self._unsent, []
        for key in unsent:
            self.note_not_captured(*key)

    def note_captured(self, donor_id: str, generation: int) -> None:
        """Every rank holds its KV: only now can it be found."""
        prompt = self._on_the_way.pop((donor_id, generation), None)
        self._copied_from.pop((donor_id, generation), None)
        if prompt is None:  # reset meanwhile, or made of wrong KV
            self._drop(donor_id, generation)
            return
        try:
            self._semblend.register(prompt, donor_id)
        except SemBlendError as error:
            self._drop(donor_id, generation)
            self._report_failure("capture", str(error), donor_id)
            return
        self._held[donor_id] = generation
        self.epoch += 1
        self.lineage.note(donor_id.removesuffix(ANSWERED), donor_id)
        try:
            self._supersede(donor_id, generation)
        except SemBlendError as error:  # its earlier turns stay beside it
            self._report_failure("supersede", str(error), donor_id)
        if (publication := self._publish(donor_id, generation, prompt)) is not None:
            self._publications.append(publication)

    def _supersede(self, donor_id: str, generation: int) -> None:
        """Earlier turns of a conversation are in its newest donor; the directory's go when their writers say so."""
        older = self._semblend.supersede(donor_id, lambda name: self._held.get(name, GENERATION) != GENERATION)
        names = [one.donor_id for one in older]
        if names:
            for name in names:
                self.lineage.note(name, donor_id)
            self._heirs += [(key, (donor_id, generation)) for key in self._drops if key[0] in names]
            self._earlier[donor_id] = [name for one in names for name in (one, *self._earlier.pop(one, ()))]

    def find_heir(self, donor_id: str) -> str | None:
        """The donor that holds what stood under an id, of a donor or of a request; None where it is gone."""
        return self.lineage.find(donor_id, self.holds)

    def find_beginning(self, session: ReuseSession) -> str | None:
        """Found by block hashes: nobody has to look at the tokens of a prompt that vLLM holds."""
        namespace, hashes = session.prompt.namespace.digest, session.request.source.block_hashes
        donor_id, generation = self._prefixes.find_beginning(namespace, hashes) or ("", -1)
        return donor_id if self.find_generation(donor_id) == generation != -1 else None

    def keep_first(self, donor_id: str, seconds: float) -> None:
        self._semblend.keep(donor_id, seconds)
        self._kept_first.append((donor_id, self.find_generation(donor_id), seconds))

    def note_report(self, report: Report) -> None:
        """What the workers have captured, could not capture, and lost."""
        for key in report.not_captured:
            self.note_not_captured(*key)
        for key in sorted(report.captured, key=lambda key: key[1]):  # a prompt before what it is a part of
            self.note_captured(*key)
        for key in report.evicted:
            self.note_lost(*key)

    def note_not_captured(self, donor_id: str, generation: int) -> None:
        self._on_the_way.pop((donor_id, generation), None)
        self._copied_from.pop((donor_id, generation), None)
        self._guard(lambda shared: shared.take_back(donor_id))
        self._drop(donor_id, generation)  # another rank may have it

    def drop_copies_of(self, block_ids: Set[int]) -> None:
        """Donors on their way that are copied from one of these blocks never arrive."""
        for key in [key for key, blocks in self._copied_from.items() if not block_ids.isdisjoint(blocks)]:
            self.note_not_captured(*key)

    def note_lost(self, donor_id: str, generation: int) -> None:
        """A rank let it go; the others hear of it by the drops."""
        if self._held.get(donor_id) == generation:
            self._semblend.forget(donor_id, reason="engine")

    def catch_up(self) -> bool:
        """Do what an operator has asked for since the last call; whether all donors are void by now."""
        if self.admin is not None:
            self.admin.work_off()
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
        self._prefixes.clear()
        self._on_the_way.clear()
        self._copied_from.clear()
        self._publications.clear()
        self._guard(lambda shared: shared.reset(self._semblend.clear))
        self._semblend.clear()  # where the directory could not be told, too

    def close(self) -> None:
        """Published donors stay."""
        if self.shared is not None:
            self.shared.close()
            self.shared = None

    def take_publications(self) -> list[Publication]:
        publications, self._publications = self._publications, []
        return publications

    def take_drops(self) -> list[tuple[str, int]]:
        drops, self._drops = self._drops, []
        return drops

    def take_forgotten(self) -> list[str]:
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def take_heirs(self) -> list[tuple[tuple[str, int], tuple[str, int]]]:
        heirs, self._heirs = self._heirs, []
        return heirs

    def take_kept_first(self) -> list[tuple[str, int, float]]:
        kept, self._kept_first = self._kept_first, []
        return kept

    def take_pins(self) -> list[tuple[str, int, bool]]:
        pins, self._pins = self._pins, []
        return pins

    def _note_evicted(self, eviction: Eviction) -> None:
        self._pinned.discard(eviction.donor.donor_id)
        earlier = self._earlier.get(eviction.donor.donor_id, [])
        if eviction.reason != "superseded":
            self._earlier.pop(eviction.donor.donor_id, None)
        if eviction.reason == "forgotten":
            self._forgotten += [eviction.donor.donor_id, *earlier]
        generation = self._held.pop(eviction.donor.donor_id, None)
        if self.shared is not None:
            self.shared.note_eviction(eviction.donor.donor_id, eviction.reason)
        self.epoch += 1
        if generation is not None:
            self._drop(eviction.donor.donor_id, generation)

    def _drop(self, donor_id: str, generation: int) -> None:
        """The workers shall let it go."""
        self._prefixes.remove((donor_id, generation))
        self._drops.append((donor_id, generation))

    def _guard(self, ask: Callable[[SharedDonors], Answer]) -> Answer | None:
        """The border to the donor directory: where it cannot be read or written, the engine goes on without it."""
        if self.shared is None:
            return None
        try:
            return ask(self.shared)
        except OSError as error:
            self._report_failure("directory", f"the donor directory is given up: {error}", "")
            self.shared = None
            return None


# -- Notices that vLLM has emptied its prefix cache.
#
# vLLM tells a connector so only where the caller asks for that (``reset_connector``). A plain ``reset_prefix_cache`` is
# what people call after new weights too, so donors must go with it. The pool is looked at instead: a reset gives it a
# new table of hashes, in every version that we know.


class ResetWatch:
    """Looks at vLLM's block pool; a reset that failed, because blocks were in use, changed nothing and is not seen."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        # The table itself, not its id: the id of a table that is gone may be given to its successor.
        self._table = self._find_table()

    def was_reset(self) -> bool:
        """Whether the prefix cache was emptied since the last call."""
        before, self._table = self._table, self._find_table()
        return self._table is not before

    def _find_table(self) -> Any:
        return getattr(self._pool, "cached_block_hash_to_block", None)
