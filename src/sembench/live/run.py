"""A live run: its settings, the log that lets it resume, its records, and the loop over cases."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from sembench.backends import PromptCall, ServerAnswer, ServerBackend
from sembench.files import make_folder_of, open_output, read_count, read_float, read_text
from sembench.manifests.cases import Case
from sembench.result import OUTPUT_TEXT_CHARS, RequestRecord, dump_record, get_unix_time, parse_record
from sembench.scoring.answers import ComparableAnswer, repeats_prompt, score_against_cold, score_against_gold
from sembench.witnesses import prometheus
from sembench.witnesses.audit import AuditLog, join_all
from sembench.witnesses.confirmation import Confirmation, Expectation, confirm, measure_shared_text
from sembench.witnesses.prometheus import CounterDelta, Scraper, Snapshot
from semblend._version import __version__
from semblend.cli.output import say
from semblend.errors import InputError, SemBlendError

# -- settings --------------------------------------------------------------------------------------------------------

PAIRED_ARMS = ("cold", "warm", "rerun")
COLD_ARMS = frozenset({"cold", "rerun"})
ISOLATIONS = ("flush", "salt", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """The settings of a live run. ``isolation`` is how a case gets an empty cache: flush, salt or none.

    ``top_logprobs`` None asks for none. After ``tenant`` primed a prompt, ``other_tenant`` asks the same prompt, for
    ``tenant_pairs`` cases: nothing of it may be reused.
    """

    arms: tuple[str, ...] = ("single",)
    isolation: str = "salt"
    donor_tokens: int = 1
    recipient_tokens: int = 16
    post_donor_delay_ms: float = 0.0
    cooldown_ms: float = 0.0
    warmup_requests: int = 0
    block_size: int = 16
    top_logprobs: int | None = None
    quality_threshold: float = 0.60
    quality_f1_floor: float = 0.10
    tenant: str = ""
    template: str = ""
    tenant_pairs: int = 0
    other_tenant: str = "tenant-b"
    tenant_salt: bool = False
    reuse: bool = True
    concurrency: int = 1
    min_donor_gap_requests: int = 0
    seed: int = 0
    max_items: int | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise InputError(f"--concurrency {self.concurrency} runs nothing", hint="1 or more")
        if self.together and self.isolation == "flush":
            raise InputError(
                "a flush empties the cache of every case that is under way",
                hint="leave --concurrency at 1, or use salts",
            )
        if self.together and len(self.arms) > 1:
            raise InputError("paired arms are timed one after the other", hint="leave --concurrency at 1")

    @property
    def together(self) -> bool:
        """Whether several cases run at the same time; counters cannot tell them apart then."""
        return self.concurrency > 1 or self.min_donor_gap_requests > 0


# -- the resume log --------------------------------------------------------------------------------------------------
# One line for each finished item, beside the result file: a run that is interrupted, or whose server dies, loses at
# most the item it was working on. The result file is written at the end of the run, and the log is deleted then.

FORMAT = "sembench.partial.v1"
T = TypeVar("T")


class PartialLog(Generic[T]):
    """The finished items of a run by name. ``what`` describes the run; a log of another run is not continued.

    ``dump`` turns an item into JSON values, ``parse`` turns them back; what it returns None for is done again.
    ``run_name`` stands in the id of every request, so that an engine's log can be joined to this run and to no other.
    It stays the same when a run is continued. ``sessions`` are the starts of the run, this one included.
    """

    def __init__(
        self,
        output: str,
        what: Mapping[str, Any],
        dump: Callable[[T], Any],
        parse: Callable[[Any, str], T | None],
        *,
        resume: bool,
        session: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(f"{output}.partial.jsonl")
        self.done: dict[str, T] = {}
        self.run_name = uuid.uuid4().hex[:8]
        self.sessions: list[Mapping[str, Any]] = []
        self._dump = dump
        make_folder_of(self.path)
        if resume and self.path.exists():
            self._read(json.loads(json.dumps(what)), parse)
        elif self.path.exists():  # keep it: it may hold hours of measuring, and --resume may have been forgotten
            self.path.replace(f"{self.path}.old")
            say(f"note: an interrupted run was found and kept as {self.path}.old; --resume would have gone on with it")
        self.sessions.append(dict(session or {}))
        header = {"partial_version": FORMAT, "sembench_version": __version__, "run_name": self.run_name}
        # The new file replaces the old one in one step, so that earlier measurements are never missing.
        with open_output(self.path) as stream:
            stream.write(json.dumps({**header, "sessions": self.sessions, "what": dict(what)}) + "\n")
            stream.writelines(self._format_item(name) for name in self.done)
        self._stream: TextIO = self.path.open("a", encoding="utf-8")

    def add(self, name: str, item: T) -> None:
        self.done[name] = item
        self._stream.write(self._format_item(name))
        self._stream.flush()

    def close(self, *, finished: bool) -> None:
        self._stream.close()
        if finished:
            self.path.unlink(missing_ok=True)

    def _format_item(self, name: str) -> str:
        return json.dumps({"item_id": name, "records": self._dump(self.done[name])}) + "\n"

    def _read(self, what: Mapping[str, Any], parse: Callable[[Any, str], T | None]) -> None:
        """Take the items that an earlier session finished; a last line that was cut off is left out."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            value = _parse_object(line)
            if value is None or (number > 1 and not {"item_id", "records"} <= value.keys()):
                if number == len(lines) > 1:
                    break
                raise InputError(f"{self.path} line {number} is damaged", hint="start without --resume")
            if number == 1:
                self._check_header(value, what)
                self.run_name = str(value.get("run_name") or self.run_name)
                self.sessions = [dict(one) for one in value.get("sessions") or () if isinstance(one, dict)]
            elif (item := parse(value["records"], f"{self.path} line {number}")) is not None:
                self.done[value["item_id"]] = item

    def _check_header(self, header: Mapping[str, Any], what: Mapping[str, Any]) -> None:
        wrote, earlier = header.get("sembench_version"), header.get("what", {})
        if header.get("partial_version") != FORMAT or wrote != __version__:
            raise InputError(
                f"{self.path} was begun by version {wrote}, this is {__version__}", hint="start without --resume"
            )
        for name, value in what.items():
            if earlier.get(name) != value:
                raise InputError(
                    f"{self.path} was begun with {name} {earlier.get(name)!r}, now it is {value!r}",
                    hint="use the same arguments, or start without --resume",
                )


class ResumeLog(PartialLog[Sequence[RequestRecord]]):
    """The finished cases of a run over a manifest; a case with an error is asked again."""

    def __init__(
        self, output: str, what: Mapping[str, Any], *, resume: bool, session: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(output, what, _dump_records, _parse_records, resume=resume, session=session)


def _dump_records(records: Sequence[RequestRecord]) -> list[Any]:
    return [dump_record(record) for record in records]


def _parse_records(value: Any, where: str) -> Sequence[RequestRecord] | None:
    records = tuple(parse_record(one, where=where) for one in value)
    return records if all(record.error is None for record in records) else None


def _parse_object(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


# -- records ---------------------------------------------------------------------------------------------------------


def build_record(
    call: PromptCall,
    case: Case,
    arm: str,
    answer: ServerAnswer,
    verdict: Confirmation,
    settings: LiveSettings,
    donors: Sequence[ServerAnswer],
    window: tuple[float, float],
) -> RequestRecord:
    """Return the record of one request; ``window`` is when it was sent and when its answer ended, in Unix seconds.

    A donor that failed makes it an error: the test was not fair.
    """
    failed = next((f"a donor could not be primed: {donor.error}" for donor in donors if donor.error), None)
    prompt, meta = answer.prompt_tokens, case.metadata
    return RequestRecord(
        **case.describe(),
        pair_id=case.item_id if arm in PAIRED_ARMS else None,
        arm=arm,
        tenant=call.tenant or None,
        traffic_class=read_text(meta.get("traffic_class")),
        donor_count=len(donors),
        prompt_tokens=prompt,
        total_blocks=_count_blocks(prompt, settings.block_size),
        expected_supplied_tokens=read_count(meta.get("expected_supplied_tokens")),
        expected_span_target_start=read_count(meta.get("expected_span_target_start")),
        donor_worker_ids=tuple(donor.route.worker_id for donor in donors if donor.route.worker_id),
        error=answer.error or failed,
        sent_unix_s=window[0],
        finished_unix_s=window[1],
        max_tokens=call.max_tokens,
        donor_request_ids=tuple(dict.fromkeys(name for donor in donors for name in donor.ids)),
        **_build_confirmation_fields(verdict, settings.block_size),
        **_build_answer_fields(answer),
        **({} if answer.error else _score(answer, case, settings)),
    )


def _score(answer: ServerAnswer, case: Case, settings: LiveSettings) -> dict[str, Any]:
    """Return the scores of an answer, and whether it is the prompt's own beginning."""
    scores = score_against_gold(answer.text, case, settings.quality_threshold, settings.quality_f1_floor)
    return scores | {"echoes_prompt": repeats_prompt(answer.text, case.recipient_prompt)}


def _build_confirmation_fields(verdict: Confirmation, block: int) -> dict[str, Any]:
    """Return the fields about reuse. In a live run, exact hits are what the engine's prefix cache served."""
    exact, external = verdict.exact_tokens, verdict.external_confirmed_tokens
    hits = {"hit_tokens": exact, "hit_blocks": _count_blocks(exact, block)}
    return {
        **asdict(verdict),
        **{f"{kind}_{name}": value for kind in ("exact", "exact_prefix") for name, value in hits.items()},
        "backend_confirmed_blocks": _count_blocks(verdict.backend_confirmed_tokens, block),
        "external_confirmed_tokens_source": None if external is None else "arm_prometheus_delta",
    }


_SAME = ("malformed", "ttft_ms", "latency_ms", "engine_ttft_ms", "queue_time_ms", "output_tokens", "finish_reason")
_ROUTE = ("endpoint_id", "outcome", "semantic_score", "total_score", "reason")


def _build_answer_fields(answer: ServerAnswer) -> dict[str, Any]:
    receipt, route = answer.receipt or {}, answer.route
    donors = receipt.get("donors")
    return {
        **{name: getattr(answer, name) for name in _SAME},
        "donor_ids": tuple(str(one) for one in donors) if isinstance(donors, list) else (),
        "rejection_reason": read_text(receipt.get("reason")),
        "engine_request_id": next(iter(answer.ids[1:] or answer.ids), None),
        "request_ids": answer.ids,
        "server_ttft_ms": read_float(receipt.get("ttft_ms")),
        "output_text": answer.text[:OUTPUT_TEXT_CHARS],
        "output_token_ids": answer.token_ids or None,
        "output_top_logprobs": [dict(one) for one in answer.top_logprobs] or None,
        **{f"route_{name}": getattr(route, name) for name in _ROUTE},
        "gateway_route_header": route.header,
        "worker_id": route.worker_id,
    }


def _count_blocks(tokens: int | None, block: int) -> int | None:
    return None if tokens is None else tokens // block


# -- the loop --------------------------------------------------------------------------------------------------------
# The live loop: empty the cache, prime the donors, ask the recipient, weigh the evidence of reuse.
#
# A case runs in one arm or in three. ``cold`` asks the recipient with an empty cache. ``warm`` asks it after its
# donors. ``rerun`` is cold once more: the difference between two cold answers is the noise. The order of the arms is
# random for each case, so that a server that becomes faster or slower over time favours none of them.

TENANT_PAIR = "tenant_pair"
MOST_FAILURES = 3
SETTLE_S = (0.05, 0.2, 0.5)
"""Pauses before the counters are read again, in seconds: servers count a request a moment after its last token."""


class BackendGoneError(SemBlendError):
    """The server stopped answering. What was measured is kept."""


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """One answer, and the record that was made from it."""

    record: RequestRecord
    answer: ServerAnswer


class LiveRun:
    """One run over a manifest. ``progress`` is called with the number of finished cases and the latest record."""

    def __init__(
        self,
        backend: ServerBackend,
        settings: LiveSettings,
        scraper: Scraper,
        resume_log: ResumeLog,
        *,
        audit: Callable[[], AuditLog] | None = None,
        progress: Callable[[int, RequestRecord], None] | None = None,
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._scraper = scraper
        self._log = resume_log
        self._audit = audit
        self._progress = progress
        self._failures = 0
        # Salts are drawn anew in each session: a case that is asked again after --resume finds an empty cache.
        self._session = uuid.uuid4().hex[:8]
        self._request_prefix = "-".join(("sb", resume_log.run_name, *([self._session] if resume_log.done else [])))
        self._scrapes: list[list[Snapshot | None]] = []
        self.donor_ttft_ms: list[float] = []
        self.isolation_verified: bool | None = None

    # -- the whole run ---------------------------------------------------------------------------------------------

    async def run(self, cases: Iterable[Case]) -> list[RequestRecord]:
        """Run all cases and return their records in the order of the manifest. Raise if the server is gone."""
        await self._prepare()
        order: list[str] = []
        async for item_id, records in self._run_cases(cases):
            order.append(item_id)
            if records is not None:
                self._log.add(item_id, records)
            if self._progress is not None:
                self._progress(len(order), self._log.done[item_id][-1])
        if self._failures:  # the server died during the last requests
            raise self._make_gone_error("no answer to the last request")
        self._scrapes.append(await self._scraper.take_snapshot())
        found = [record for item_id in order for record in self._log.done[item_id]]
        if self._audit is None:
            return found
        log = self._audit()
        return join_all(found, log, self._settings.block_size)

    @property
    def process_start_unix_s(self) -> float | None:
        """When the measured process was started, by its own metrics; a restart between two sessions shows here."""
        return prometheus.find_process_start(self._scrapes[-1] if self._scrapes else [])

    def compute_engine_delta(self) -> dict[str, Any]:
        """Return how much the server's counters rose over the whole run."""
        if len(self._scrapes) < 2:
            return prometheus.summarize_deltas([])
        first, last = self._scrapes[0], self._scrapes[-1]
        paired = prometheus.pair_snapshots(first, last)
        return prometheus.summarize_deltas(paired, failed=len(first) - len(paired))

    async def _run_cases(self, cases: Iterable[Case]) -> AsyncIterator[tuple[str, Sequence[RequestRecord] | None]]:
        """Yield each item with its records, or with None if an earlier run has finished it."""
        settings = self._settings
        pairs_left = settings.tenant_pairs
        waiting: list[tuple[str, asyncio.Task[list[RequestRecord]] | None]] = []
        slots = asyncio.Semaphore(settings.concurrency)
        gap = _DonorGap(settings.min_donor_gap_requests)
        for case in cases:
            with_tenants = pairs_left > 0 and not case.negative_control
            pairs_left -= with_tenants
            if case.item_id in self._log.done:
                waiting.append((case.item_id, None))
            else:
                gap.open(case.item_id)
                waiting.append((case.item_id, asyncio.create_task(self._run_item(case, with_tenants, slots, gap))))
            while len(waiting) > (settings.concurrency + settings.min_donor_gap_requests if settings.together else 0):
                yield await self._await_item(*waiting.pop(0))
        gap.release()
        for item_id, task in waiting:
            yield await self._await_item(item_id, task)

    async def _await_item(
        self, item_id: str, task: asyncio.Task[list[RequestRecord]] | None
    ) -> tuple[str, Sequence[RequestRecord] | None]:
        return (item_id, None) if task is None else (item_id, await task)

    async def _run_item(
        self, case: Case, with_tenants: bool, slots: asyncio.Semaphore, gap: _DonorGap
    ) -> list[RequestRecord]:
        """Run every arm of one case in random order, then its tenant pair if it has one."""
        arms = list(self._settings.arms)
        random.Random(f"{self._settings.seed}:{case.item_id}").shuffle(arms)
        asked = {arm: await self._run_arm(case, arm, slots, gap) for arm in arms}
        records = _compare_arms(asked)
        if with_tenants:
            records.append((await self._run_tenant_pair(case, slots)).record)
        return records

    # -- one arm ---------------------------------------------------------------------------------------------------

    async def _run_arm(self, case: Case, arm: str, slots: asyncio.Semaphore, gap: _DonorGap) -> AnsweredCall:
        salt = await self._empty_cache(case, arm)
        settings, primed = self._settings, case.donor_prompts if arm not in COLD_ARMS else ()
        call = self._make_call(case.recipient_prompt, settings.recipient_tokens, f"{case.item_id}-{arm}", salt, case)
        async with slots:
            donors = [await self._prime(donor.text, f"{case.item_id}-{arm}-d{at}", salt, case, donor.metadata)
                      for at, donor in enumerate(primed)]  # fmt: skip
        gap.mark_primed(case.item_id)
        await gap.wait(case.item_id)
        if primed and settings.post_donor_delay_ms:
            await asyncio.sleep(settings.post_donor_delay_ms / 1000)
        expected = Expectation(
            must_be_cold=arm in COLD_ARMS and settings.isolation != "none",
            may_reuse=not case.negative_control,
            donor_tokens=_sum_known([donor.prompt_tokens for donor in donors])
            if settings.isolation != "none"
            else None,
            shared=measure_shared_text(case.recipient_prompt, [d.text for d in primed])
            if settings.isolation != "none"
            else None,
            alone=not settings.together,
        )
        async with slots:
            asked = await self._ask(call, case, arm, expected, donors)
        if settings.cooldown_ms:
            await asyncio.sleep(settings.cooldown_ms / 1000)
        return asked

    async def _run_tenant_pair(self, case: Case, slots: asyncio.Semaphore) -> AnsweredCall:
        """Prime a prompt as one tenant and ask the same prompt as another: nothing may be reused."""
        settings = self._settings
        salt = await self._empty_cache(case, TENANT_PAIR)
        name = f"{case.item_id}-{TENANT_PAIR}"
        mine, theirs = (f"{salt}/a", f"{salt}/b") if settings.tenant_salt else (salt, salt)
        call = self._make_call(case.recipient_prompt, settings.recipient_tokens, name, theirs, case)
        async with slots:
            donor = await self._prime(case.recipient_prompt, f"{name}-d0", mine, case, case.metadata)
            expected = Expectation(may_reuse=False, other_tenant=True, alone=not settings.together)
            case = replace(case, item_id=name, transform=TENANT_PAIR, negative_control=False)
            other = replace(call, tenant=settings.other_tenant)
            return await self._ask(other, case, "single", expected, [donor], cross_tenant=True)

    async def _ask(
        self,
        call: PromptCall,
        case: Case,
        arm: str,
        expected: Expectation,
        donors: Sequence[ServerAnswer],
        cross_tenant: bool = False,
    ) -> AnsweredCall:
        before = await self._scraper.take_snapshot() if expected.alone else []
        sent = get_unix_time()
        answer = self._check_answer(await self._backend.ask(call))
        window = sent, sent + (answer.latency_ms or 0.0) / 1000
        delta = await self._read_settled_counters(before, answer) if expected.alone else None
        verdict = confirm(answer, replace(expected, max_tokens=call.max_tokens), delta)
        record = build_record(call, case, arm, answer, verdict, self._settings, donors, window)
        if cross_tenant:
            record = replace(record, cross_tenant=True, tenant=self._settings.other_tenant)
        if record.flush_contaminated is None and self.isolation_verified is False:
            record = replace(record, flush_contaminated=True)
        return AnsweredCall(record, answer)

    async def _prime(self, text: str, name: str, salt: str, case: Case, chat: Mapping[str, Any]) -> ServerAnswer:
        call = self._make_call(text, self._settings.donor_tokens, name, salt, case, chat)
        answer = self._check_answer(await self._backend.ask(call, donor=True))
        if answer.ttft_ms is not None:
            self.donor_ttft_ms.append(answer.ttft_ms)
        return answer

    def _make_call(
        self, text: str, tokens: int, name: str, salt: str, case: Case, chat: Mapping[str, Any] | None = None
    ) -> PromptCall:
        """Return the call of a text; ``chat`` holds it as messages, where it was logged so (None: the case's own)."""
        settings, meta = self._settings, case.metadata
        chat = meta if chat is None else chat
        return PromptCall(
            text=text,
            max_tokens=tokens,
            request_id=f"{self._request_prefix}-{name}",
            tenant=str(meta.get("tenant") or meta.get("tenant_id") or settings.tenant),
            template=str(meta.get("template") or meta.get("template_id") or settings.template),
            salt=salt,
            top_logprobs=settings.top_logprobs,
            reuse=settings.reuse,
            messages=_list_objects(chat.get("messages")),
            tools=_list_objects(chat.get("tools")),
        )

    async def _read_settled_counters(
        self, before: Sequence[Snapshot | None], answer: ServerAnswer
    ) -> CounterDelta | None:
        """Return how the counters moved. If they have not counted the request yet, wait a moment and read again."""
        if not before:
            return None
        for wait in (*SETTLE_S, None):
            moved = prometheus.merge_deltas(prometheus.pair_snapshots(before, await self._scraper.take_snapshot()))
            reused = (answer.receipt or {}).get("reused_tokens")
            counted = moved.compute_rise(*prometheus.REUSED_TOKENS)
            unequal = reused is not None and counted is not None and counted != reused
            behind = moved.compute_rise(*prometheus.REQUESTS) == 0 or unequal
            if wait is None or answer.error or not behind:
                return moved
            await asyncio.sleep(wait)
        return None

    def _check_answer(self, answer: ServerAnswer) -> ServerAnswer:
        if answer.error is None or not answer.connection_failed:
            self._failures = 0
        else:
            self._failures += 1
        if self._failures >= MOST_FAILURES:
            raise self._make_gone_error(answer.error or "")
        if answer.error is not None and "cache_salt" in answer.error:
            raise InputError(
                f"the server does not take cache_salt: {answer.error}",
                hint="give --reset-url, or --isolation none and accept a shared cache",
            )
        return answer

    def _make_gone_error(self, why: str) -> BackendGoneError:
        return BackendGoneError(
            f"the server stopped answering: {why}",
            hint=f"start it and run the same command with --resume; {len(self._log.done)} cases are kept",
        )

    # -- before the first case -------------------------------------------------------------------------------------

    async def _empty_cache(self, case: Case, arm: str) -> str:
        """Flush the cache, or return a salt that nobody has used: an empty cache either way."""
        if self._settings.isolation == "flush":
            error = await self._backend.flush()
            if error is not None:
                raise BackendGoneError(f"the cache cannot be emptied: {error}", hint="check the URL, or use salts")
        if self._settings.isolation != "salt":
            return ""
        return hashlib.sha256(f"{self._session}:{case.item_id}:{arm}".encode("utf-8", "surrogatepass")).hexdigest()[:32]

    async def _prepare(self) -> None:
        """Warm up, check that isolation works, and read the counters."""
        for number in range(self._settings.warmup_requests):
            await self._warm_up(number, arm=f"warmup{number}")
        if self._settings.isolation != "none":
            # The same prompt twice, with the cache emptied in between: cached tokens in the second answer show a leak.
            await self._warm_up(0, arm="probe0")
            again = await self._warm_up(0, arm="probe1")
            cached = again.cached_tokens
            self.isolation_verified = None if cached is None or again.error else cached == 0
        self._scrapes.append(await self._scraper.take_snapshot())

    async def _warm_up(self, number: int, arm: str) -> ServerAnswer:
        case = Case(f"{arm}", "warmup", arm, arm, (), _make_warm_up_text(number))
        salt = await self._empty_cache(case, arm)
        return self._check_answer(await self._backend.ask(self._make_call(case.recipient_prompt, 4, arm, salt, case)))


class _DonorGap:
    """Holds a recipient back until a number of other cases were primed after its donors."""

    def __init__(self, gap: int) -> None:
        self._gap = gap
        self._primed: list[str] = []
        self._doors: dict[str, asyncio.Event] = {}
        self._released = False

    def open(self, item_id: str) -> None:
        self._doors[item_id] = asyncio.Event()

    def mark_primed(self, item_id: str) -> None:
        self._primed.append(item_id)
        for earlier in self._primed[: len(self._primed) - self._gap]:
            self._doors[earlier].set()

    async def wait(self, item_id: str) -> None:
        if self._gap and not self._released:
            await self._doors[item_id].wait()

    def release(self) -> None:
        """Let all recipients go: no further case will come."""
        self._released = True
        for door in self._doors.values():
            door.set()


def _compare_arms(asked: dict[str, AnsweredCall]) -> list[RequestRecord]:
    """Return the records in the order cold, warm, rerun; warm and rerun get their distance from cold."""
    records = []
    cold = asked.get("cold")
    for arm in sorted(asked, key=lambda name: PAIRED_ARMS.index(name) if name in PAIRED_ARMS else -1):
        one = asked[arm]
        comparable = cold is not None and arm != "cold" and cold.answer.error is None and one.answer.error is None
        if comparable and cold is not None:
            records.append(
                score_against_cold(
                    one.record, ComparableAnswer.from_answer(one.answer), ComparableAnswer.from_answer(cold.answer)
                )
            )
        else:
            records.append(one.record)
    return records


def _list_objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _sum_known(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _make_warm_up_text(number: int) -> str:
    words = (f"{number * 61 + at * 7} boats pass bridge {at % 13}" for at in range(24))
    return "Count the boats. " + "; ".join(words) + ". How many boats were there?"
