"""Passes over a prompt: choose rows, run them through the engine's model, check what came out.

What a pass computes, and why that is enough. KV of a row depends on the tokens up to it. A pass writes new rows (gaps,
or tokens chosen for repair); of the rows that earlier passes computed, those behind the first new row have attended to
KV that is now different and are computed again, the question among them; those before it have not, and stay. So after
every pass each computed row is what the model computes over the KV that lies before it, and a prompt with all its
tokens chosen is a cold prefill.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from semblend.errors import RankError
from semblend.materialize.blend.quality import (
    OnPass,
    Pace,
    Pass,
    PieceRate,
    Pieces,
    QualitySettings,
    Step,
    Target,
    count_piece_rows,
)
from semblend.materialize.contract import QUESTION_ROWS, Model, Observer, Rows, StopPass, find_runs
from semblend.materialize.gate.gate import Gate
from semblend.materialize.gate.observers import (
    DEEP_ROWS,
    DeepLook,
    KvDeviation,
    canary_positions,
    choose_deep_rows,
    cut_windows,
    find_deep_deviation,
    find_largest,
    find_tolerance,
    measure_rows,
)
from semblend.materialize.gate.thresholds import RiskFeatures, bound_risk, next_token_kl
from semblend.plan.reuse_plan import Decline, DeclineReason, ReusePlan
from semblend.plan.selection import Positions, keep_in_order, list_reused_positions, select_seams
from semblend.plan.times import Timed, Work
from semblend.span import Span

# -- What passes over a prompt compute: known from the plan alone.


def first_rows(tokens: int, exact: int, spans: Sequence[Span], settings: QualitySettings) -> Positions:
    """Gaps, the heads of spans, what moved ahead, and the end of the prompt, whoever holds it.

    The attention of the end is the question's. What moved ahead: docs/research/decisions/divergence-budget.md.

    >>> settings = QualitySettings(seam_tokens=1, first_seam_tokens=2, question_tokens=1)
    >>> first_rows(10, 1, [Span("d", 0, 3, 6)], settings).tolist()
    [1, 2, 3, 4, 9]
    """
    kept = keep_in_order(spans, settings.moved_ahead_share)
    wanted = np.ones(tokens, dtype=bool)
    wanted[:exact] = False
    wanted[list_reused_positions(kept)] = False
    wanted[select_seams(kept, settings.seam_tokens)] = True
    wanted[select_seams(kept[:1], settings.first_seam_tokens)] = True
    wanted[max(exact, tokens - max(1, settings.question_tokens)) :] = True
    return np.flatnonzero(wanted)


# -- The state of one request while it is prepared: what is known, what was computed, what passes showed.


Mask = npt.NDArray[np.bool_]


class Refused(Exception):  # noqa: N818  (control flow of the blender)
    """Ends the work on a request with a decline."""

    def __init__(self, reason: DeclineReason, detail: str, faulty_donors: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        self.decline = Decline(reason, detail, faulty_donors=faulty_donors)


@dataclass(slots=True, eq=False)
class BlendState:
    """One request while it is prepared. ``computed`` marks what passes of ours have computed so far."""

    tokens: Tensor
    context: Tensor
    spans: tuple[Span, ...]
    exact: int
    reused: Positions
    computed: Mask
    gate: Gate = field(default_factory=Gate)
    on_pass: OnPass | None = None
    started: float = field(default_factory=time.perf_counter)
    passes: list[Pass] = field(default_factory=list)
    first_tail: Tensor | None = None
    tail: Tensor | None = None  # logits of the prompt's last tokens after the last pass, [rows, vocabulary]
    mass: npt.NDArray[np.floating[Any]] | None = None
    deviation: npt.NDArray[np.floating[Any]] | None = None
    canary: float | None = None
    deep: float | None = None  # how far donor KV is off above layer 0, by `DeepLook`
    looked_at: tuple[Tensor, Tensor] | None = None  # by the canary: positions, and the error of each on this rank
    step: Step | None = None  # the last one that was taken
    risk: float | None = None
    features: RiskFeatures | None = None
    escalations: int = 0
    repaired: int = 0  # chosen by steps of the gate; heads of spans and the prompt's end come on top
    load_ms: float = 0.0

    @classmethod
    def of(cls, target: Target, plan: ReusePlan, device: torch.device, spans: tuple[Span, ...]) -> BlendState:
        """The state of a prompt whose slots lie on ``device``; refused where plan and prompt do not fit together."""
        if target.slots is None:
            raise Refused(DeclineReason.ERROR, "the prompt has no slots yet")
        tokens = torch.as_tensor(target.tokens, dtype=torch.long)[: plan.prompt_tokens].cpu()
        context = target.slots[: plan.prompt_tokens].to(device)
        if not 0 <= plan.exact_tokens < plan.prompt_tokens == len(tokens) == len(context):
            raise Refused(
                DeclineReason.ERROR,
                f"a plan for {plan.prompt_tokens} tokens ({plan.exact_tokens} exact), {len(tokens)} tokens, "
                f"{len(context)} slots",
            )
        end = plan.exact_tokens
        for span in spans:
            if span.target_start < end or span.length < 1 or span.target_end > plan.prompt_tokens:
                raise Refused(DeclineReason.ERROR, f"{span} does not lie in order inside the prompt")
            end = span.target_end
        computed = np.zeros(plan.prompt_tokens, dtype=bool)
        return cls(tokens, context, spans, plan.exact_tokens, list_reused_positions(spans), computed)

    def first_rows(self, settings: QualitySettings) -> Positions:
        """What the first pass computes."""
        return first_rows(len(self.tokens), self.exact, self.spans, settings)

    @property
    def stale(self) -> Positions:
        """Positions that still hold donor KV."""
        found: Positions = self.reused[~self.computed[self.reused]]
        return found

    def count_tokens(self) -> dict[str, Any]:
        """The four kinds of tokens, which sum to the prompt, and the runs that a donor held and that are computed."""
        stale = len(self.stale)
        return {
            "exact_tokens": self.exact,
            "reused_tokens": stale,
            "recomputed_tokens": len(self.reused) - stale,
            "prefill_tokens": len(self.tokens) - self.exact - len(self.reused),
            "recomputed_runs": find_runs(self.reused[self.computed[self.reused]]),
        }

    def find_faulty_donors(self, tolerance: float) -> tuple[str, ...]:
        """Donors of which the canary has seen a wrong row on this rank; waits for the device."""
        if self.looked_at is None:
            return ()
        at, errors = self.looked_at
        wrong = at.numpy()[~(errors.float().cpu() <= tolerance).numpy()]  # an error that is no number is wrong too
        hit = [span.donor_id for span in self.spans if ((wrong >= span.target_start) & (wrong < span.target_end)).any()]
        return tuple(dict.fromkeys(hit))

    def spent_rows(self, layers: int) -> float:
        """Rows that went through all ``layers`` so far; parts of a pass count as such."""
        return sum(one.rows * one.layers for one in self.passes) / layers

    def count_work(self, layers: int) -> float:
        """Work of all passes as a share of a cold prefill's: the mean of its share of rows and, if larger, of keys.

        Products of the layers grow with rows, attention with keys. A pass over scattered rows at the end of a prompt
        has more keys a row than a prefill; which of the two costs more depends on the model and the length.
        """
        tokens, exact = len(self.tokens), self.exact
        cold_keys = (tokens * (tokens + 1) - exact * (exact + 1)) // 2
        keys = sum(one.keys * one.layers for one in self.passes) / layers
        rows = self.spent_rows(layers) / (tokens - exact)
        return (rows + max(rows, keys / cold_keys)) / 2

    @property
    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self.started) * 1e3


# -- Ranks that compute one model together, each with its own heads, and must decide alike.


class Ranks:
    """Whatever decides what is computed next passes through here, so that it is one number for all ranks of a model.

    With one rank everything is as that rank sees it.
    """

    def __init__(self, model: Model) -> None:
        self._model = model

    @property
    def several(self) -> bool:
        return self._model.capabilities.ranks > 1

    def read(self, values: Tensor | None) -> npt.NDArray[np.floating[Any]]:
        """What an observer has seen, the mean of all ranks, on the host."""
        if values is None:
            raise Refused(DeclineReason.ERROR, "the observer saw nothing")
        found: npt.NDArray[np.floating[Any]] = self._agree(values, "mean").float().cpu().numpy()
        return found

    def mean(self, value: float) -> float:
        """The mean of what the ranks have measured."""
        if not self.several:
            return value
        return float(self._agree(torch.tensor([value], device=self._model.device), "mean"))

    def largest(self, values: Tensor) -> Tensor:
        """The largest of the ranks' numbers, each by itself, still on the device; what is no number is infinite."""
        return self._agree(values.nan_to_num(nan=math.inf, posinf=math.inf), "max") if self.several else values

    def raise_if_several(self, error: Exception) -> None:
        """Raise `RankError` where other ranks wait for this one in what they compute together; else do nothing."""
        if isinstance(error, RankError):
            raise error
        if self.several:
            self._fail(error)

    def _agree(self, values: Tensor, how: str) -> Tensor:
        if not self.several:
            return values
        try:
            return self._model.agree(values, how)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        here, cause = self._model.capabilities, f"{type(error).__name__}: {error}".splitlines()[0]
        name = f"one of {here.ranks} ranks" if here.rank is None else f"rank {here.rank} of {here.ranks}"
        raise RankError(
            f"{name} failed while all of them computed reused KV: {cause}",
            hint="the ranks no longer agree, so the engine stops: start it again; without SemBlend if it comes back",
        ) from error


class PassRunner:
    """Runs passes of one prompt at a time through a model; remembers how fast they were.

    Passes are `Pieces`: they stop after about so much work as ``pace`` says, when the device has done it.
    """

    def __init__(self, model: Model, settings: QualitySettings, ranks: Ranks, pace: Pace) -> None:
        self.model, self.settings, self.ranks, self.pace = model, settings, ranks, pace
        self.prompts_checked = 0
        self._rows_per_ms = 0.0
        self._piece_rate = PieceRate(settings.piece_rows)

    def compute(
        self,
        state: BlendState,
        name: str,
        rows: Positions,
        observer: Observer | None,
        *,
        check: bool = False,
        deep: bool = False,
    ) -> Pieces[float]:
        """Runs the rows and waits; returns how far the next-token distribution moved, in nats.

        ``check``: the canary looks at the donor KV in layer 0; ``deep``: and above, at rows that are computed with
        these for it. It is queued behind the pass, so that a GPU is not kept idle. Raises `Refused` where the donor KV
        was wrong or the logits are not finite.
        """
        began, started = state.elapsed_ms, time.perf_counter()
        canary = self._choose_canary_rows(state) if check else torch.empty(0, dtype=torch.long)
        look = self._make_deep_look(state, rows, canary) if deep else None
        if look is not None:
            rows = np.union1d(rows, look.at)
        hidden = yield from self.run_layers(state, name, rows, observer, layers=self.model.layout.layers, look=look)
        if hidden is None:
            raise Refused(DeclineReason.ERROR, f"the pass {name!r} ended early")
        tail = self.model.logits(hidden)
        self._check(state, name, tail, canary, look)
        ms = state.elapsed_ms - began
        if not self._piece_rate.rows_per_ms:
            self._note_rate(len(rows), started)
        # Small passes are slower a row than large ones: the best rate seen foretells a large one.
        self._rows_per_ms = max(self._rows_per_ms, len(rows) / max(ms, 1e-6))
        before, state.tail = state.tail, tail
        moved = 0.0 if before is None else next_token_kl(tail[-1], before[-1])
        state.computed[rows] = True
        state.first_tail = tail if before is None else state.first_tail
        state.passes[-1] = replace(state.passes[-1], ms=ms, kl=None if before is None else moved)
        if state.on_pass is not None:
            state.on_pass(state.passes[-1], tail)
        return moved

    def _check(self, state: BlendState, name: str, tail: Tensor, canary: Tensor, look: DeepLook | None) -> None:
        """Waits for the pass; raises `Refused` where the donor KV was wrong or the logits are not finite.

        Everything is read from the device at once, and every rank reads the same.
        """
        nothing = torch.zeros((), device=tail.device)
        error = self._measure_canary(state, canary).to(tail.device).float() if len(canary) else nothing
        off = look.compare() if look is not None else None
        donors = _group_by_donor(look.at, state.spans) if look is not None else {}
        windows = cut_windows(list(donors.values()))
        furthest = find_deep_deviation(off, windows).to(tail.device) if off is not None else nothing
        verdict = torch.stack((error, furthest, (~tail.isfinite()).any().float()))
        largest, deviation, broken = self.ranks.largest(verdict).tolist()
        if len(canary):
            state.canary = self._check_canary(state, bound_risk(largest))
        if off is not None:
            self._check_deep_look(state, donors, off, bound_risk(deviation))
        if broken:
            # NaN reaches rows before it too (0 x NaN behind a mask), so no further pass of ours can mend it.
            raise Refused(DeclineReason.VALIDATION_FAILED, f"logits after the pass {name!r} are not numbers")

    def run_layers(
        self,
        state: BlendState,
        name: str,
        rows: Positions,
        observer: Observer | None,
        layers: int,
        look: DeepLook | None = None,
    ) -> Pieces[Tensor | None]:
        """Runs the rows in chunks, ascending, so that each sees what the one before wrote.

        Returns the hidden states of the prompt's last tokens, None where the observer stopped the pass. The question
        stays in one chunk. Nobody waits for the last one. ``look`` hears of the begin and end of chunks, not of layers.
        """
        began, hidden, left = state.elapsed_ms, None, len(rows)
        for chunk in self._split(rows, layers):
            started, part = time.perf_counter(), self._make_rows(state, torch.from_numpy(chunk))
            watchers = [one for one in (observer, look) if one is not None]
            for one in watchers:
                one.on_begin(part, self.model.layout)
            try:
                hidden = self.model.forward(part, observer)
            except StopPass:
                hidden = None
            for one in watchers:
                one.on_end(part, self.model.layout)
            left -= len(chunk)
            if left and self.pace.piece_ms:
                self._wait_for_device()
                self._note_rate(len(chunk) * layers / self.model.layout.layers, started)
                yield from self.put_aside(state)
        if hidden is not None:
            hidden = hidden[-self._tail_rows(state) :].clone()
        state.passes.append(Pass(name, len(rows), int((rows + 1).sum()), layers, state.elapsed_ms - began))
        return hidden

    def put_aside(self, state: BlendState) -> Pieces[None]:
        """The end of a piece, if work goes in pieces: waits for the device, and lets the engine do something else.

        Only then is it known how long the piece took. What the engine does meanwhile is no time of this request.
        """
        if not self.pace.piece_ms:
            return
        self._wait_for_device()
        since = time.perf_counter()
        yield
        state.started += time.perf_counter() - since

    def prefill(self, state: BlendState) -> Pieces[None]:
        """Computes everything from the first donor token on: a cold prefill over what lies before it."""
        rows = np.arange(len(state.tokens) - self.prefill_rows(state), len(state.tokens))
        yield from self.compute(state, "prefill", rows, None)

    def prefill_rows(self, state: BlendState) -> int:
        """How many rows a full prefill has to compute now."""
        # What lies before the first donor token attended to nothing of a donor, once the first pass has computed it.
        first = int(state.reused[0]) if len(state.reused) and state.passes else state.exact
        return len(state.tokens) - first

    def is_affordable(self, state: BlendState, rows: int) -> bool:
        """Whether so many rows more fit into the request's latency budget, by the best rate seen."""
        budget = self.settings.latency_budget_ms
        if not budget:
            return True
        return self.ranks.mean(state.elapsed_ms + rows / max(self._rows_per_ms, 1e-9)) <= budget

    def check_donor_kv(self, state: BlendState) -> float:
        """The canary alone, waited for; raises `Refused` where the donor KV is wrong."""
        found = self._measure_canary(state, self._choose_canary_rows(state))
        return self._check_canary(state, bound_risk(float(self.ranks.largest(found.reshape(1)))))

    def _split(self, rows: Positions, layers: int) -> Iterator[Positions]:
        """The rows as one pass takes them: in chunks, and run by run for a model that cannot take scattered rows."""
        end = 0
        while not end or end < len(rows):
            start, end = end, end + self._choose_chunk_rows(layers, len(rows) - end)
            end = len(rows) if end + QUESTION_ROWS >= len(rows) else end
            chunk = rows[start:end]
            if self.model.capabilities.scattered_rows:
                yield chunk
            else:
                yield from np.split(chunk, np.flatnonzero(np.diff(chunk) != 1) + 1)

    def _choose_chunk_rows(self, layers: int, left: int) -> int:
        """Rows of a chunk: as many as a piece has time for, by the pieces done last; all ranks choose alike."""
        if not self.pace.piece_ms:
            return self.settings.chunk_tokens
        rate = self.ranks.mean(self._piece_rate.rows_per_ms) * self.model.layout.layers / layers
        return count_piece_rows(
            rate, self.pace.piece_ms, self.settings.chunk_tokens, left, least=self.settings.piece_rows
        )

    def _note_rate(self, rows: float, started: float) -> None:
        self._piece_rate.note(rows, (time.perf_counter() - started) * 1e3)

    def _wait_for_device(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()

    def _make_rows(self, state: BlendState, at: Tensor) -> Rows:
        """Rows at these positions. They come from the host, so that asking where they are is no wait for a GPU.

        Taken by numpy: torch would wake all its threads for a few thousand tokens, which takes milliseconds.
        """
        return Rows.of(torch.from_numpy(state.tokens.numpy()[at.numpy()]), at, state.context)

    def _tail_rows(self, state: BlendState) -> int:
        """Rows at the end that every pass computes: their next-token distributions can be compared."""
        return max(1, min(self.settings.question_tokens, len(state.tokens) - state.exact))

    def _choose_canary_rows(self, state: BlendState) -> Tensor:
        """The positions at which layer 0 is looked at: other tokens of each block with every request."""
        starts, ends = (
            torch.tensor([getattr(s, name) for s in state.spans]) for name in ("target_start", "target_end")
        )
        self.prompts_checked += 1
        return canary_positions(starts, ends, seed=self.prompts_checked)

    def _measure_canary(self, state: BlendState, at: Tensor) -> Tensor:
        """On a sample: is this the KV that its tokens ask for? What a pass has overwritten is right in any case."""
        state.looked_at = at, measure_rows(self.model, self._make_rows(state, at))
        return find_largest(state.looked_at[1])

    def _make_deep_look(self, state: BlendState, rows: Positions, canary: Tensor) -> DeepLook | None:
        """Chooses the rows by which deep layers are judged; None where donors hold too little, or nobody wants it.

        They are others than those whose layer 0 is looked at: the pass overwrites them before that look.
        """
        taken = np.zeros(len(state.tokens), dtype=bool)
        taken[rows] = True
        computed = taken[state.reused]
        taken[canary.numpy()] = True
        kept = state.reused[~taken[state.reused]]
        donors = _group_by_donor(kept, state.spans).values()
        most, seed = DEEP_ROWS // max(1, len(donors)), self.prompts_checked
        at = np.sort(np.concatenate([choose_deep_rows(kept[rows], most=most, seed=seed) for rows in donors]))
        return DeepLook(at, state.reused[computed]) if len(at) and self.settings.deep_tolerance else None

    def _check_deep_look(
        self, state: BlendState, donors: Mapping[str, Positions], off: Tensor, deviation: float
    ) -> None:
        state.deep, tolerance = deviation, self.settings.deep_tolerance
        if deviation > tolerance:
            wrong = [
                name
                for name, rows in donors.items()
                if len(rows) and float(find_deep_deviation(off, cut_windows([rows]))) > tolerance
            ]
            raise Refused(
                DeclineReason.VALIDATION_FAILED,
                f"KV from donors is off by {deviation:.3g} of what tokens differ by in some layer, "
                f"another text in front explains {tolerance:g} (deep_tolerance)",
                tuple(wrong),
            )

    def _check_canary(self, state: BlendState, error: float) -> float:
        tolerance = self.settings.canary_tolerance
        if tolerance is None:
            model = self.model
            tolerance = find_tolerance(
                model.layout.dtype, latents=model.rope.rotary_start > 0, narrow=model.capabilities.narrow
            )
        if error > tolerance:
            raise Refused(
                DeclineReason.VALIDATION_FAILED,
                f"layer-0 KV from donors is off by {error:.3g} of its size, at most {tolerance:g} is rounding",
                state.find_faulty_donors(tolerance),
            )
        return error


def _group_by_donor(at: Positions, spans: Sequence[Span]) -> dict[str, Positions]:
    """Which of the positions ``at`` are of each donor, as indices."""
    found: dict[str, list[Positions]] = {}
    for span in spans:
        inside = np.flatnonzero((at >= span.target_start) & (at < span.target_end))
        found.setdefault(span.donor_id, []).append(inside)
    return {name: np.concatenate(parts) for name, parts in found.items()}


# -- How long a pass takes, few rows or many: measured once, when an engine starts.


FEW_ROWS = 32
"""A repair has about as many at least. One row alone takes other kernels."""
MANY_ROWS = {"cpu": 128, "cuda": 4096}
"""Rows of the long pass: enough for the device to be busy with rows."""
_TIMED_RUNS = 2


def time_passes(
    model: Model, slots: Tensor, *, clock: Callable[[], float] = time.perf_counter
) -> tuple[Timed, Timed] | None:
    """Measure a pass over few rows and one over many; None where ``slots`` are too few to tell.

    ``slots`` belong to nobody and are written to.
    """
    many = min(MANY_ROWS.get(model.device.type, MANY_ROWS["cpu"]), len(slots))
    if many <= FEW_ROWS:
        return None

    def time_pass(rows: int) -> Timed:
        at = torch.arange(rows)
        tokens = torch.zeros_like(at)
        run = lambda: model.logits(model.forward(Rows.of(tokens, at, slots))[-1:])  # noqa: E731
        return Timed(Work.of_prefill(rows), time_best(run, model.device, clock=clock))

    return time_pass(FEW_ROWS), time_pass(many)


def run_rare_passes(model: Model, slots: Tensor) -> None:
    """Passes for which an engine may compile something when it meets the first: a look at layer 1, with which edited
    histories begin, and rows all over a prompt, too many to be recorded. ``slots`` belong to nobody.

    The first edited history on an H200 took 1.2 s, later ones of its size 30 ms; what was compiled was not seen.
    """
    first_full = next(layer for layer in range(model.layout.layers) if layer not in model.capabilities.windowed)
    if first_full + 1 < model.layout.layers:
        for count in (FEW_ROWS, len(slots)):
            at = torch.arange(min(count, len(slots)))
            with suppress(StopPass):
                model.forward(Rows.of(torch.zeros_like(at), at, slots), KvDeviation(first_full + 1))
    if model.capabilities.scattered_rows:
        at = torch.arange(0, len(slots), 2)
        model.forward(Rows.of(torch.zeros_like(at), at, slots))


def time_best(run: Callable[[], Any], device: torch.device, *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Milliseconds that something takes on a device; the best of two counts, so that a busy moment does not."""
    best = math.inf
    for _ in range(_TIMED_RUNS):
        started = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (clock() - started) * 1e3)
    return best
