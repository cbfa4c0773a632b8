"""Runs one batch: donor KV is put in place, the rest is computed, and the next tokens are sampled."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from semblend.engine.core.reuse import Reuse
from semblend.engine.core.scheduler import Batch, Piece
from semblend.engine.core.sequence import Sequence
from semblend.engine.model.attention import RowBatch
from semblend.engine.model.model import DecoderModel
from semblend.engine.model.paged_kv import KvPool
from semblend.engine.model.sampling import Draw, Sampled, rewind, sample
from semblend.materialize.contract import Rows, StopPass

log = logging.getLogger("semblend.engine")
Results = list[tuple[Sequence, Sampled | Exception | None]]
"""What became of each sequence that got its next token: the token, the error, or None where logits were not finite."""


class Runner:
    """Computes what the scheduler decided; admits and ends nothing.

    ``learn`` is told how long a batch took. A batch that may take any time is given up where ``is_awaited`` says that
    somebody else has come: its sequences stay where they are.
    """

    def __init__(
        self,
        model: DecoderModel,
        pool: KvPool,
        reuse: Reuse,
        learn: Callable[[Batch, float], None],
        is_awaited: Callable[[], bool],
    ) -> None:
        self._model = model
        self._pool = pool
        self._reuse = reuse
        self._learn = learn
        self._is_awaited = is_awaited

    def run(self, batch: Batch) -> Results:
        """Fill what donors hold, compute the rest, and sample for every sequence whose tokens all have KV now."""
        return self._compute_isolated(self._fill(batch))

    def _fill(self, batch: Batch) -> Batch:
        """Fill at most one prompt of the batch from donors; where donors are declined, its piece stays in the batch.

        Filling takes passes of its own, and running answers shall wait for those of one prompt at most, for as long as
        the batch may work on prompts. Prompts behind the filled one leave the batch, and so does one whose filling
        goes on: they keep their blocks and are tried in the next step.
        """
        pieces: list[Piece] = []
        filled: list[Sequence] = []
        may_fill = True
        for piece in batch.pieces:
            if not piece.sequence.to_fill:
                pieces.append(piece)
            elif may_fill:
                sequence, rows = piece.sequence, piece.rows
                if self._reuse.fill(sequence, batch.work_ms, self._is_awaited):
                    filled.append(sequence)
                elif not sequence.to_fill:  # declined, or donor KV is in place and the rest is computed like any prompt
                    pieces.append(Piece(sequence, sequence.computed, sequence.find_end(rows)))
                may_fill = not (filled or sequence.to_fill)
        return Batch(tuple(pieces), tuple(filled), batch.work_ms)

    def _compute_isolated(self, batch: Batch) -> Results:
        """Compute the batch; where that fails, compute each sequence alone, so that only those fail that fail again.

        A second pass is safe: it writes the same KV to the same slots, and ``computed`` moves only after a success.
        """
        try:
            return self._compute(batch)
        except StopPass:
            return []
        except Exception as error:
            log.exception("a step of %d tokens failed", batch.tokens)
            if len(batch.sequences) == 1:
                return [(batch.sequences[0], error)]
        results: Results = []
        for part in batch.split():
            (sequence,) = part.sequences
            rewind(sequence.generator, 0 if sequence.request.sampling.greedy else len(sequence.answer))
            try:
                results += self._compute(part)
            except Exception as error:  # told to the request; its neighbours live on
                results.append((sequence, error))
        return results

    def _compute(self, batch: Batch) -> Results:
        started = time.perf_counter()
        complete: list[Sequence] = []
        logits: list[Tensor] = []
        if batch.pieces:
            rows = RowBatch.of([self._make_rows(piece) for piece in batch.pieces])
            stop = self._is_awaited if batch.work_ms is None else None
            hidden = self._model.forward(rows, self._pool, stop=stop)
            ends = [last for piece, last in zip(batch.pieces, rows.last_rows, strict=True) if piece.completes]
            complete += [piece.sequence for piece in batch.pieces if piece.completes]
            if ends:
                logits.append(self._model.logits(hidden[ends]))
        for sequence in batch.filled:
            complete.append(sequence)
            logits.append(self._reuse.read_first_logits(sequence))
        sampled = sample(torch.cat(logits), [_make_draw(sequence) for sequence in complete]) if complete else []
        elapsed_ms = (time.perf_counter() - started) * 1e3
        if complete or self._pool.device.type == "cpu":  # else nobody has waited for the device
            self._learn(Batch(batch.pieces), elapsed_ms)
        for piece in batch.pieces:
            if piece.sequence.receipt is None:
                piece.sequence.compute_ms += elapsed_ms
            piece.sequence.computed = piece.end
        return list(zip(complete, sampled, strict=True))

    def _make_rows(self, piece: Piece) -> Rows:
        sequence = piece.sequence
        slots = sequence.slots_in(self._pool)[: piece.end]
        if sequence.held is None:
            positions = torch.arange(piece.start, piece.end, device=self._pool.device)
            return Rows.of(sequence.tokens[piece.start : piece.end], positions, slots)
        missing = sequence.list_missing(piece.start, piece.end)
        return Rows.of([sequence.tokens[at] for at in missing], torch.from_numpy(missing), slots)


def _make_draw(sequence: Sequence) -> Draw:
    return Draw(sequence.request.sampling, sequence.generator, sequence.tokens, sequence.prompt_tokens)
