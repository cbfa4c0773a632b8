"""KV reuse around ``model.generate()`` of transformers: find donors, prepare a cache, keep what was computed.

    prepare    a prompt becomes a cache: the exact prefix of a donor, then KV moved from donors and checked. Whatever is
               missing in it, the last token at least, generate() computes itself
    keep       generate() is over: the exact part of the cache becomes a donor, and the receipt is written
    generate   both around one call

A failure costs time: the cache is then empty or shorter, an event says why, and the answer is right.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from semblend.config import GIB, SemBlendConfig
from semblend.confirm import events
from semblend.confirm.receipt import Receipt
from semblend.confirm.sinks import Sink
from semblend.discover.donor import Eviction
from semblend.errors import InputError
from semblend.facade import SemBlend
from semblend.integration.transformers.model_access import TransformersModel
from semblend.integration.transformers.refusals import Options, refuse_call, refuse_disagreement, refuse_model
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.contract import KvLayout, Layout, Rows
from semblend.materialize.gate.observers import canary_positions, find_tolerance, measure_canary
from semblend.materialize.gate.thresholds import choose_table
from semblend.materialize.kv.moves import Move
from semblend.materialize.kv.splice import splice
from semblend.materialize.weights_watch import WeightsWatch
from semblend.prompt import Namespace, Prompt, TokenArray
from semblend.quality import parse_quality
from semblend.session.local import LocalSessions, SlotPool
from semblend.session.session import SessionRequest
from semblend.session.settings import LocalSettings

log = logging.getLogger("semblend.transformers")

ENGINE = "transformers"


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What ``model.generate()`` returned, and what became of the prompt; no receipt for a batch."""

    output: Any
    receipt: Receipt | None

    @property
    def sequences(self) -> Tensor:
        """Prompt and answer, ``[sequences, tokens]``."""
        found: Tensor = self.output if isinstance(self.output, Tensor) else self.output.sequences
        return found


class TransformersReuse:
    """Reuses KV in ``model``, one prompt after the other; see the module. Raises where the model cannot be served.

    ``quality``: exact (equal prefixes only), fast, balanced, or a number of nats. ``donor_bytes``: host memory for
    donors, ``device_bytes``: memory of the model's GPU for them. ``config`` has all settings of the library.
    """

    def __init__(
        self,
        model: Any,
        *,
        quality: str | float | None = None,
        donor_bytes: int = 4 * GIB,
        device_bytes: int = 0,
        config: SemBlendConfig | None = None,
        sinks: Iterable[Sink] = (),
    ) -> None:
        import transformers

        access = make_access(model, transformers.__version__)
        config = SemBlendConfig() if config is None else config
        if quality is not None:
            config = replace(config, quality=str(quality))
        self.model, self._access = model, access
        self._watch, self._structure = WeightsWatch(model), _read_structure(model)
        self.semblend = SemBlend(_allow_lookups(config), sinks=sinks)
        settings = LocalSettings(config=config, donor_host_bytes=donor_bytes, donor_device_bytes=device_bytes)
        self._sessions = LocalSessions(
            self._access,
            self.semblend,
            SlotPool(self._take_slots, _give_nothing_back),
            settings,
            _make_quality(config, model),
            engine=ENGINE,
            engine_version=transformers.__version__,
        )
        self._prefixes = PrefixIndex()
        self._sessions.donors.on_kept = self._prefixes.add
        self.semblend.on_evicted(self._note_evicted)
        self._base = Namespace(
            model=str(getattr(model.config, "_name_or_path", "")),
            kv_dtype=str(self._access.dtype),
            rope=str(model.config.to_dict().get("rope_parameters") or ""),
        )
        self._numbers = itertools.count(1)
        self._abandoned: list[str] = []
        self._lock = threading.RLock()
        self._exact_tokens = 0

    # -- what a script calls -----------------------------------------------------------------------------------------

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        tenant: str = "",
        salt: str = "",
        quality: str | float | None = None,
        base: str = "",
        **arguments: Any,
    ) -> Answer:
        """``model.generate()`` with reuse. What cannot be served (batches, beams) runs without, and an event says why.

        ``tenant`` and ``salt`` wall donors off; ``quality`` is this prompt's own. ``base``: the ``request_id`` of the
        receipt whose prompt this one was edited from. Everything else goes to the model.
        """
        with self._lock:
            if why := refuse_call(input_ids, attention_mask, Options(arguments, self.model)):
                return Answer(self._call(input_ids, attention_mask, arguments), self._note_refused(input_ids, why))
            cache = self.prepare(input_ids, tenant=tenant, salt=salt, quality=quality, base=base)
            try:
                output = self._call(input_ids, attention_mask, {**arguments, "past_key_values": cache})
            except BaseException:
                self.drop(cache)
                raise
            return Answer(output, self.keep(cache, Answer(output, None).sequences))

    def prepare(
        self,
        input_ids: Tensor,
        *,
        tenant: str = "",
        salt: str = "",
        quality: str | float | None = None,
        base: str = "",
    ) -> ReuseCache:
        """A cache for this prompt, ``[1, tokens]`` or ``[tokens]``, to be handed to generate() as past_key_values.

        It holds KV of at most all tokens but the last. Hand it to `keep` afterwards, or to `drop`.
        """
        with self._lock:
            tokens = _read_tokens(input_ids)
            request_id = f"{ENGINE}-{next(self._numbers)}"
            prompt = Prompt(tokens, namespace=replace(self._base, tenant=tenant, salt=salt))
            cache = ReuseCache(request_id, prompt)
            waiting = SessionRequest(
                request_id,
                prompt,
                longest_prefix=len(prompt) - 1,
                quality=None if quality is None else parse_quality(str(quality)),
                base=base,
            )
            try:
                self._prepare(waiting, cache)
            except Exception as error:  # the border: it costs time, and generate() computes the prompt
                self._sessions.stand_back(waiting, 0, "it failed")
                self._sessions.give_up(request_id, "load", error)
                cache = ReuseCache(request_id, prompt)  # the other one may be filled in part
            finally:
                self._access.lay_out(None)
            weakref.finalize(cache, self._abandoned.append, request_id)
            return cache

    def keep(self, cache: ReuseCache, sequences: Tensor) -> Receipt | None:
        """What generate() returned for this cache: the exact part of its KV becomes a donor. Gives the receipt.

        Without a donor where the cache and ``sequences`` do not fit together; None where it was called before.
        """
        with self._lock:
            request_id = cache.request_id
            try:
                slots, answered = self._check_finished(cache, sequences)
                return self._sessions.note_prompt(request_id, slots, answered)
            except Exception as error:
                self._sessions.give_up(request_id, "finish", error)
                return self._sessions.note_prompt(request_id, None)
            finally:
                self._access.lay_out(None)
                self._sessions.forget(request_id)

    def drop(self, cache: ReuseCache) -> None:
        """This cache is not used, or its answer is of no interest: nothing is kept or counted."""
        with self._lock:
            self._sessions.forget(cache.request_id)

    def clear(self) -> None:
        """Forget every donor."""
        with self._lock:
            self._sessions.reset()

    def close(self) -> None:
        """Let go of all donors and close the library."""
        with self._lock:
            self._sessions.reset()
            self.semblend.close()

    def __enter__(self) -> TransformersReuse:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- parts -------------------------------------------------------------------------------------------------------

    def _prepare(self, waiting: SessionRequest, cache: ReuseCache) -> None:
        while self._abandoned:
            self._sessions.forget(self._abandoned.pop())
        if why := self._explain_model_changed():
            self._sessions.stand_back(waiting, 0, why)
            return
        self._exact_tokens = 0
        self._access.lay_out(self._access.make_layout(len(waiting.prompt)))
        self._exact_tokens = self._place_prefix(waiting.prompt)
        provided = 0
        if self._sessions.offer(waiting, self._exact_tokens):
            self._sessions.load(waiting.request_id, lambda: self._take_first_slots(self._exact_tokens))
            provided = self._sessions.work(waiting.request_id, busy=False) or 0
            self._sessions.find_tail(waiting.request_id)
        if ready := self._exact_tokens + provided:
            cache.fill(self._access.layout, ready)

    def _place_prefix(self, prompt: Prompt) -> int:
        """Put the longest prefix that a donor shares into the first slots; how many tokens it has."""
        found = self._prefixes.find(prompt)
        if found is None:
            return 0
        donor_id, shared = found[0], min(found[1], len(prompt) - 1)
        kv = self._sessions.donors.kv
        tensors = kv.acquire(donor_id, self._sessions.donors.generations.get(donor_id, -1)) if shared else None
        if tensors is None:
            return 0
        try:
            splice(
                [Move(tensors, 0, shared, self._take_first_slots(shared), 0)], self._access.layout, self._access.rope
            )
        finally:
            kv.release(tensors)
        return shared

    def _take_first_slots(self, count: int) -> Tensor:
        return torch.arange(count, device=self._access.device)

    def _take_slots(self, count: int) -> Tensor:
        """Slots behind the exact prefix: a prompt's position is its slot."""
        return torch.arange(self._exact_tokens, self._exact_tokens + count, device=self._access.device)

    def _check_finished(self, cache: ReuseCache, sequences: Tensor) -> tuple[Tensor | None, list[int]]:
        """The slots and the answered tokens of a cache that may become a donor; no slots where it may not."""
        if self._explain_model_changed():
            return None, []
        said, prompt, view = _read_tokens(sequences), cache.prompt, cache.view()
        length = view.slots
        if not len(prompt) <= length <= len(said) or not np.array_equal(said[: len(prompt)], prompt.token_ids):
            raise InputError(f"these are not the {length} tokens of this cache", hint="pass what generate() returned")
        self._access.lay_out(view)
        slots = self._take_first_slots(length)
        at = canary_positions(torch.tensor([0]), torch.tensor([length]))
        rows = Rows.of(torch.from_numpy(said[at.numpy()].astype(np.int64)), at, slots)
        error = float(measure_canary(self._access, rows))
        if not error <= find_tolerance(self._access.dtype):
            raise InputError(f"the KV of this cache is not that of its tokens, by {error:.2g}", hint="use a cache once")
        return slots, said[len(prompt) : length].tolist()

    def _explain_model_changed(self) -> str | None:
        """Why nothing may be reused now. Donors of other weights are dropped."""
        if self.model.training:
            return "the model is in training mode"
        if self._structure != _read_structure(self.model):
            return "the model has got other modules or hooks since it was first seen"
        if self._watch.have_changed():
            log.warning("SemBlend: the model has new weights; the donors of the old ones are dropped")
            self._sessions.reset()
        return None

    def _call(self, input_ids: Tensor, attention_mask: Tensor | None, arguments: dict[str, Any]) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self.model.generate(input_ids, attention_mask=mask, **arguments)

    def _note_refused(self, input_ids: Tensor, why: str) -> Receipt | None:
        log.info("SemBlend: runs without reuse: %s", why)
        if input_ids.dim() != 2 or input_ids.shape[0] != 1:
            if self.semblend.events:
                self.semblend.events.emit(events.error("generate", why, engine=ENGINE))
            return None
        request_id = f"{ENGINE}-{next(self._numbers)}"
        waiting = SessionRequest(
            request_id, Prompt(_read_tokens(input_ids), namespace=self._base), input_ids.shape[1] - 1
        )
        self._sessions.stand_back(waiting, 0, why)
        try:
            return self._sessions.note_prompt(request_id, None)
        finally:
            self._sessions.forget(request_id)

    def _note_evicted(self, eviction: Eviction) -> None:
        self._prefixes.remove(eviction.donor.donor_id)


def make_access(model: Any, version: str) -> TransformersModel:
    """The model as our blender wants it; raises where it cannot be served, and says why."""
    why, access = refuse_model(model, version), None
    try:
        if why is None:
            access = TransformersModel(model)
            why = refuse_disagreement(access.measure_disagreement(), access.dtype)
    except Exception as error:
        why = f"a pass of ours fails in it ({type(error).__name__}: {error})"
    if why is not None or access is None:
        raise InputError(f"no KV can be reused in this model: {why}", hint="see docs/guides/transformers.md")
    return access


def _give_nothing_back(slots: Tensor) -> None:
    """Slots are the positions of a prompt; they go with its cache."""


def _read_tokens(ids: Any) -> Any:
    """One sequence of token ids, ``[1, tokens]`` or ``[tokens]``, as an array in host memory."""
    tokens = torch.as_tensor(ids).detach().cpu()
    if tokens.dim() == 2 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.dim() != 1 or tokens.is_floating_point() or not len(tokens):
        raise InputError(f"token ids of shape {list(tokens.shape)}", hint="one prompt at a time: [1, tokens]")
    return tokens.numpy()


def _read_structure(model: torch.nn.Module) -> tuple[int, ...]:
    """Changes when modules are put in, taken out or hooked: adapters and steering do that, and weights stay."""
    found: list[int] = []
    for module in model.modules():
        found += (id(module), len(module._forward_hooks), len(module._forward_pre_hooks))
    return tuple(found)


def _allow_lookups(config: SemBlendConfig) -> SemBlendConfig:
    """A request may ask for more than the default quality exact; its session sees to it that others get no plan."""
    return replace(config, quality="balanced") if config.quality == "exact" else config


def _make_quality(config: SemBlendConfig, model: Any) -> QualitySettings:
    gate = choose_table(str(getattr(model.config, "_name_or_path", "")))
    log.info("SemBlend's quality gate: %s", gate.describe())
    return QualitySettings.of_config(config, gate.thresholds, prefills=False)  # generate() does that itself


# -- Which donor begins with the same tokens as a prompt: its KV of that prefix is what a prefill would compute.
#
# Tokens are hashed in a chain of blocks, as prefix caches do, and the longest known chain names a donor. Then its
# tokens are compared, so that a hash proposes and equality decides, and the prefix may end inside a block.


BLOCK_TOKENS = 16


class PrefixIndex:
    """Donors by the beginning of their tokens.

    >>> index = PrefixIndex()
    >>> index.add("d", Prompt(range(100)))
    >>> index.find(Prompt([*range(40), 7, 7, 7])), index.find(Prompt([*range(10), 7, 7, 7]))
    (('d', 40), None)
    """

    def __init__(self) -> None:
        self._donors: dict[bytes, dict[str, None]] = {}
        self._tokens: dict[str, Prompt] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, donor_id: str, prompt: Prompt) -> None:
        """A donor of these tokens, in the namespace of ``prompt``, can be found from now on."""
        self.remove(donor_id)
        self._tokens[donor_id] = prompt
        for key in hash_blocks(prompt):
            self._donors.setdefault(key, {})[donor_id] = None

    def remove(self, donor_id: str) -> None:
        """Forget a donor, if it was known."""
        prompt = self._tokens.pop(donor_id, None)
        for key in hash_blocks(prompt) if prompt is not None else ():
            holders = self._donors.get(key, {})
            holders.pop(donor_id, None)
            if not holders:
                self._donors.pop(key, None)

    def clear(self) -> None:
        self._donors.clear()
        self._tokens.clear()

    def find(self, prompt: Prompt) -> tuple[str, int] | None:
        """The donor with the longest common prefix, the newest of equals, and the prefix in tokens; None for none."""
        holders: dict[str, None] = {}
        for key in hash_blocks(prompt):
            if key not in self._donors:
                break
            holders = self._donors[key]
        best: tuple[str, int] | None = None
        for donor_id in reversed(holders):
            donor = self._tokens[donor_id]
            if donor.namespace != prompt.namespace:
                continue
            shared = count_common(donor.token_ids, prompt.token_ids)
            if shared >= BLOCK_TOKENS and (best is None or shared > best[1]):
                best = donor_id, shared
        return best


def hash_blocks(prompt: Prompt) -> Iterator[bytes]:
    """One hash a full block, of its tokens, all before them, and the namespace."""
    digest = hashlib.blake2b(prompt.namespace.digest.encode(), digest_size=16)
    for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
        digest.update(prompt.token_ids[end - BLOCK_TOKENS : end].tobytes())
        yield digest.digest()


def count_common(one: TokenArray, other: TokenArray) -> int:
    """How many leading tokens are equal.

    >>> count_common(Prompt([1, 2, 3]).token_ids, Prompt([1, 2, 4, 5]).token_ids)
    2
    """
    most = min(len(one), len(other))
    differ = one[:most] != other[:most]
    return int(differ.argmax()) if differ.any() else most


# -- The cache that ``model.generate()`` is handed.


class ReuseCache(DynamicCache):
    """KV of the first ``prepared_tokens`` of ``prompt``; generate() computes the rest and appends to it.

    ``request_id`` names its receipt. Use it once: KV of an answer is in it afterwards.
    """

    def __init__(self, request_id: str, prompt: Prompt) -> None:
        super().__init__()
        self.request_id, self.prompt, self.prepared_tokens = request_id, prompt, 0

    def fill(self, layout: Layout, tokens: int) -> None:
        """Take the KV of slots 0 … ``tokens``."""
        slots = torch.arange(tokens, device=layout.device)
        for layer in range(layout.layers):
            k, v = layout.gather(layer, slots)
            self.update(_as_states(k), _as_states(v), layer)
        self.prepared_tokens = tokens

    def view(self) -> KvLayout:
        """Its KV by position: of one sequence, or refused."""
        states = [(layer.keys, layer.values) for layer in self.layers]
        if not states or any(part is None or part.dim() != 4 or part.shape[0] != 1 for pair in states for part in pair):
            raise InputError("the cache does not hold one sequence", hint="generate one answer to one prompt")
        k, v = ([pair[at][0].transpose(0, 1) for pair in states] for at in (0, 1))
        return KvLayout.of_rows(k, v)


def _as_states(part: Tensor) -> Tensor:
    """``[tokens, heads, head_dim]`` as a cache of transformers has it, ``[1, heads, tokens, head_dim]``."""
    return part.transpose(0, 1)[None].contiguous()
