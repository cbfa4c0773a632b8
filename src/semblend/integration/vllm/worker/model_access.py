"""vLLM's own model and its cache, reached from inside a connector, as `semblend.materialize.contract` wants them.

vLLM hands a connector the cache tensors and nothing else. The model is found where the call comes from: the runner that
registers its caches holds it. It is then called as the runner calls it, compiled if it is, on the rows we choose,
inside a forward context of our own. In that context a stand-in takes the place of every layer's attention
(`pass_attention`): it shows the pass to an observer, and hands unbroken stretches of rows to vLLM's backend, one pseudo
request each with the prompt's block table, which to the backend is ordinary chunked prefill; rows that lie scattered
over the prompt go to a kernel of ours instead, because a backend would read the whole context once for each of them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from semblend.errors import SemBlendError
from semblend.integration.vllm.worker.cache_layout import probe_layout
from semblend.integration.vllm.worker.cuda_graphs import RecordedLooks, RecordedPasses
from semblend.integration.vllm.worker.latents import (
    check_latents,
    choose_latent_runs,
    keeps_latents,
    without_graphs,
    write_halves,
)
from semblend.integration.vllm.worker.pass_attention import (
    OURS,
    Attend,
    PassAttention,
    attend_in_recorded_groups,
    attend_scattered,
    can_attend,
    can_group_rows,
    choose_attention,
    compile_attention,
    count_recorded_parts,
    replace_attention,
    scale_queries,
)
from semblend.integration.vllm.worker.quantised import NARROW_TYPES, check_quantised, check_scales, lay_out_quantised
from semblend.materialize.contract import Capabilities, Layout, Observer, Rows, StopPass
from semblend.materialize.gate.observers import Canary
from semblend.materialize.kv.layout import KvLayout, LatentLayout, UnlikeLayout, copy_to_device
from semblend.materialize.kv.rope import LONGEST, RopeSpec, read_for_text

log = logging.getLogger("vllm.semblend")
_DEEPSTACK, _DEEPSTACK_TOKENS = "deepstack_input_embeds", "deepstack_input_embeds_num_tokens"
Quiet = Callable[[], Any]
"""Makes a context in which the connector's own layer hooks do nothing."""


def find_runner_of_caller() -> Any:
    """The model runner that called our hook, however many frames up it is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if hasattr(owner, "model") and hasattr(owner, "get_model"):
            return owner
        frame = frame.f_back
    raise SemBlendError("the model runner was not found among the callers", hint="is this vLLM version supported?")


class ModelInputs:
    """What the runner hands a model for text: a class that can read images takes embeddings in place of token ids, and
    one with M-RoPE positions on several axes, in text all alike. A compiled model takes nothing else.
    """

    def __init__(self, runner: Any, vllm_config: Any) -> None:
        model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        self._model = runner.get_model()
        self._embeds = bool(
            getattr(runner, "supports_mm_inputs", False) or getattr(model, "enable_prompt_embeds", False)
        )
        self._axes = int(getattr(model, "mrope_num_dims", 3)) if getattr(model, "uses_mrope", False) else 0
        self._longest = int(scheduler.max_num_batched_tokens) + 1  # as in the runner: compiled for this stride
        self._positions: Tensor | None = None

    @property
    def holds_images(self) -> bool:
        """Whether the model keeps what images of the step that is under way add to its layers (Qwen3-VL's deepstack).

        vLLM prepares a step's inputs, calls us, and then runs the step.
        """
        return bool(getattr(self._model, _DEEPSTACK, None)) and getattr(self._model, _DEEPSTACK_TOKENS, None) != 0

    @contextmanager
    def of_text(self, rows: Rows) -> Iterator[dict[str, Any]]:
        """Arguments for a pass over these rows. Until it is over, what the model keeps for the step is set aside:
        images, and embeddings of each layer (Gemma 4).
        """
        tokens = rows.tokens.to(torch.int32)
        with ExitStack() as after:
            by_layer = getattr(self._model, "per_layer_embeddings", None)
            if self._embeds and by_layer is not None:
                after.callback(by_layer[: len(rows)].copy_, by_layer[: len(rows)].clone())
            embedded = self._model.embed_input_ids(tokens) if self._embeds else None
            if embedded is not None and self.holds_images:
                kept: list[Tensor] = getattr(self._model, _DEEPSTACK)
                nothing = [torch.zeros_like(embedded)] * len(kept)
                for name, value in ((_DEEPSTACK, nothing), (_DEEPSTACK_TOKENS, 0)):
                    after.callback(setattr, self._model, name, getattr(self._model, name, None))
                    setattr(self._model, name, value)
            yield {
                "input_ids": None if self._embeds else tokens,
                "positions": self._place(rows.positions) if self._axes else rows.positions,
                "inputs_embeds": embedded,
            }

    def _place(self, positions: Tensor) -> Tensor:
        """The same position on all axes, in memory that stays, for recorded passes."""
        if self._positions is None or self._positions.shape[1] <= len(positions):
            longest = max(self._longest, len(positions) + 1)
            self._positions = torch.zeros((self._axes, longest), dtype=torch.int64, device=positions.device)
        return self._positions[:, : len(positions)].copy_(positions)


class StockModel:
    """vLLM's own model over rows of one prompt: a `Model` of `semblend.materialize.contract`."""

    def __init__(self, runner: Any, vllm_config: Any, kv_cache_config: Any, caches: Mapping[str, Tensor], quiet: Quiet):
        group = kv_cache_config.kv_cache_groups[0]
        self._model = runner.get_model()  # without the wrapper that replays CUDA graphs
        self._config, self._quiet = vllm_config, quiet
        self._inputs = ModelInputs(runner, vllm_config)
        known, own = vllm_config.compilation_config.static_forward_context, set(map(id, self._model.modules()))
        # A draft's layers lie in the same blocks. The model never runs them, so they are in no pass and no donor.
        self._names = [name for name in group.layer_names if name in caches and id(known.get(name)) in own]
        self._caches = [caches[name] for name in self._names]
        self._kv_spec = read_layer_spec(group, self._names)
        self._kinds = list_kinds(group, self._names, self.layers)
        self.keeps_latents = keeps_latents(self._kv_spec)
        if self.keeps_latents:  # as the layers see them, without the one head
            self._caches = [cache.squeeze(1) if cache.dim() == 4 else cache for cache in self._caches]
        self.narrow = check_caches(self._names, self._caches, self.layers)
        self._builders: list[tuple[Any, list[str]]] = []
        self._recorded: RecordedPasses | None = None
        self._looks: RecordedLooks | None = None
        self._groups_rows = False
        self.block_tokens: int = self._kv_spec.block_size
        self.device: torch.device = self._caches[0].device
        self.rope = RopeSpec.from_hf_config(read_rope_config(vllm_config))
        ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        rank = self.rank if ranks > 1 else None
        self.capabilities = Capabilities(
            ranks=ranks, rank=rank, windowed=find_windowed(self.layers), narrow=self.narrow
        )

    def agree(self, values: Tensor, how: str) -> Tensor:
        """The mean or the largest over the ranks that hold parts of the model."""
        from vllm.distributed import get_tp_group

        found = values.float().clone()
        largest = how == "max"
        operation = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
        torch.distributed.all_reduce(found, op=operation, group=get_tp_group().device_group)
        return found if largest else found / self.capabilities.ranks

    @property
    def module(self) -> torch.nn.Module:
        """The model itself, for whoever looks at its weights."""
        found: torch.nn.Module = self._model
        return found

    @property
    def rank(self) -> int:
        """Which of the ranks this is that hold parts of the model."""
        from vllm.distributed import get_tp_group

        return int(get_tp_group().rank_in_group)

    @property
    def kv_shape(self) -> tuple[int, int, int, torch.dtype]:
        """Layers, KV heads of this rank, head size and type of the cache; known before its layout is."""
        if len(shapes := {(int(layer.num_kv_heads), int(layer.head_size)) for layer in self.layers}) > 1:
            return len(self._names), 1, max(heads * size for heads, size in shapes), self.dtype  # see `UnlikeLayout`
        ((heads, size),) = shapes
        return len(self._names), heads, size // (2 if self.keeps_latents else 1), self.dtype  # of a latent half of it

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values outside of the cache: that of the model where the cache is narrower."""
        found: torch.dtype = self._config.model_config.dtype if self.narrow else self._caches[0].dtype
        return found

    @property
    def layers(self) -> list[Any]:
        """The attention modules, bottom up."""
        known = self._config.compilation_config.static_forward_context
        return [known[name] for name in self._names]

    @cached_property
    def layout(self) -> Layout:
        """Where KV lies. Asked for at the first use: the backend is not ready when a connector is made."""
        self._get_builders()
        if self.narrow is not None:
            shape = (self.block_tokens, *self.kv_shape[1:3])
            return lay_out_quantised(self._caches, self.layers, shape, self.narrow, self.dtype)
        members: dict[tuple[int, int], list[int]] = {}
        for number, layer in enumerate(self.layers):
            members.setdefault((layer.num_kv_heads, layer.head_size), []).append(number)
        if len(members) == 1:
            return self._lay_out(range(len(self.layers)))
        parts = {shape: self._lay_out(numbers) for shape, numbers in members.items()}
        places = {number: (parts[shape], at) for shape, same in members.items() for at, number in enumerate(same)}
        return UnlikeLayout(tuple(places[number] for number in range(len(self.layers))))

    def _lay_out(self, numbers: Sequence[int]) -> Layout:
        """Where layers of one shape keep their KV."""
        layer, caches = self.layers[numbers[0]], [self._caches[number] for number in numbers]

        def write(k: Tensor, v: Tensor, cache: Tensor, slots: Tensor) -> None:
            if self.keeps_latents:
                write_halves(layer, k, v, cache, slots)
            else:
                layer.impl.do_kv_cache_update(layer, k, v, cache, slots)

        size = int(layer.head_size) // (2 if self.keeps_latents else 1)
        found = probe_layout(caches, self.block_tokens, int(layer.num_kv_heads), size, write)
        if not self.keeps_latents:
            return found
        if type(found) is not KvLayout:
            raise SemBlendError("a token's latent does not lie in one piece", hint="report the backend's name")
        return LatentLayout(found.k, found.v)

    @cached_property
    def _with_tables(self) -> list[torch.nn.Module]:
        """Modules that rotate; most layers share one."""
        return [one for one in self._model.modules() if any("cos_sin_cache" in name for name in one._buffers)]

    @torch.inference_mode()
    def check(self) -> None:
        """Raise where this engine does not compute what our passes and moves need; seen at its start."""
        if self.keeps_latents:
            assert isinstance(self.layout, LatentLayout)
            describe = partial(self._describe_to, self._names[0])
            check_latents(self.layers[0], self.layout, self._caches[0], describe)
        else:
            modules = dict(self._model.named_modules())
            rotaries = [getattr(modules.get(name.rpartition(".")[0]), "rotary_emb", None) for name in self._names]
            like = torch.empty(0, dtype=self._config.model_config.dtype, device=self.device)
            with keep_rotation_tables(self._with_tables):
                check_rotation(rotaries, self.layers, self.rope, int(self._config.model_config.max_model_len), like)
        if self.narrow is not None:
            number = next(number for number, layer in enumerate(self.layers) if layer.sliding_window is None)
            choose = partial(choose_attention, layers=[self.layers[number]], grouped=False)
            describe = partial(self._describe_to, self._names[number])
            check_quantised(self.layers[number], self.layout, self._caches[0], describe, choose)

    @torch.inference_mode()
    def forward(self, rows: Rows, observer: Observer | None = None) -> Tensor:
        plain = not self._inputs.holds_images
        if plain and self._recorded is not None and (observer is None or observer.after_pass):
            hidden = self._recorded.run(rows)
            if hidden is not None:
                if observer is not None:
                    observer.on_queries(self._recorded.queries, rows, self.layout)
                return hidden
        if self._looks is not None and observer is not None and observer.records:
            found = self._looks.run(rows)
            if found is not None:
                observer.found = found
                raise StopPass
        grouped = self._groups_rows and not (observer is not None and observer.stops_early)
        attend = choose_attention(rows, self.layout, self.layers, grouped=grouped)
        return self._run_pass(rows, observer, attend)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles our kernels and records short passes, on a GPU, so that no request waits for it."""
        layers = self.layers
        if (views := can_attend(self.layout, layers)) is None:
            return
        compile_attention(views, layers)
        layer = next(layer for layer in layers if layer.sliding_window is None)
        self._groups_rows = can_group_rows(layer, views)
        if self.capabilities.ranks > 1:  # what ranks say to each other is not recorded
            return

        def run(rows: Rows, queries: Tensor, attend: Attend) -> Tensor:
            def keep_queries(number: int, q: Tensor) -> Tensor:
                queries[number].copy_(scale_queries(layers[number], q[-queries.shape[1] :]))
                return attend(number, q)

            return self._run_pass(rows, None, keep_queries)

        def run_kernel(rows: Rows, queries: Tensor) -> Tensor:
            parts = count_recorded_parts(rows, layer)
            return run(rows, queries, attend_scattered(rows.positions, rows.context, views, layers, parts))

        def run_groups(rows: Rows, queries: Tensor) -> Tensor:
            return run(rows, queries, attend_in_recorded_groups(rows, views, layers))

        runs = {"kernel": run_kernel} | ({"groups": run_groups} if self._groups_rows else {})
        sizes = (len(layers), layer.num_heads, layer.head_size)
        longest = int(self._config.model_config.max_model_len)
        if len({one.num_heads for one in layers}) == 1:  # what they ask is kept side by side
            self._recorded = RecordedPasses(runs, longest, sizes, like=self._caches[0])
        try:
            nobodys = torch.zeros(1, dtype=torch.int64, device=self.device)  # with something there to compare with
            drawn = torch.randn(2, 1, layer.num_kv_heads, layer.head_size, device=self.device, dtype=self.layout.dtype)
            self.layout.scatter(0, nobodys, drawn[0], drawn[1])
            self._looks = RecordedLooks(self._look, self.device)
        except Exception as error:  # whatever it is, each is launched piece by piece then
            log.warning("SemBlend's check of donor KV is not recorded: %s", error)

    def _look(self, rows: Rows) -> Tensor:
        """The canary's errors; it ends its pass before any attention is computed."""
        canary = Canary(self.rope)
        with suppress(StopPass):
            self._run_pass(rows, canary, lambda _, q: q)
        return canary.found

    def _run_pass(self, rows: Rows, observer: Observer | None, attend: Attend | None) -> Tensor:
        from vllm.forward_context import set_forward_context

        metadata = dict.fromkeys(self._names, OURS) if attend else self._make_metadata(rows)
        with (
            self._quiet(),
            keep_rotation_tables(self._with_tables),
            replace_attention(self.layers, PassAttention(rows, self.layout, observer, attend)),
            set_forward_context(
                metadata,
                self._config,
                num_tokens=len(rows),
                slot_mapping=dict.fromkeys(self._names, rows.slots),
                skip_compiled=observer is not None and observer.stops_early,
            ),
            self._inputs.of_text(rows) as inputs,
        ):
            found = self._model(**inputs, intermediate_tensors=None)
        # For a draft (EAGLE 3) the model returns hidden states of some layers beside those of the last one.
        hidden: Tensor = found[0] if isinstance(found, tuple) else found
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self._model.compute_logits(hidden)
        return found

    def _get_builders(self) -> list[tuple[Any, list[str]]]:
        """What describes a pass to the backend, and to which layers: some write their window into it."""
        if not self._builders:
            make = self.layers[0].get_attn_backend().get_builder_cls()
            config = without_graphs(self._config) if self.keeps_latents else self._config
            self._builders = [(make(spec, names, config, self.device), names) for spec, names in self._kinds]
        return self._builders

    def _make_metadata(self, rows: Rows) -> dict[str, Any]:
        """For vLLM's own attention; one pseudo request a run: its queries are the run, and its context all before."""
        described = self._describe(rows, choose_latent_runs(rows) if self.keeps_latents else rows.runs)
        made = [(builder.build(0, described, fast_build=True), names) for builder, names in self._get_builders()]
        return {name: metadata for metadata, names in made for name in names}

    def _describe_to(self, name: str, rows: Rows) -> Any:
        return self._make_metadata(rows)[name]

    def _describe(self, rows: Rows, runs: Sequence[tuple[int, int]]) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        lengths = torch.tensor([end - start for start, end in runs], dtype=torch.int32)
        starts = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)))
        ends = torch.tensor([end for _, end in runs], dtype=torch.int32)
        blocks = rows.context[:: self.block_tokens] // self.block_tokens
        table = blocks.to(torch.int32).repeat(len(lengths), 1).contiguous()
        return CommonAttentionMetadata(
            query_start_loc=copy_to_device(starts, self.device),
            query_start_loc_cpu=starts,
            seq_lens=copy_to_device(ends, self.device),
            num_reqs=len(lengths),
            num_actual_tokens=len(rows),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=table,
            slot_mapping=rows.slots,
            causal=True,
            positions=rows.positions,
            seq_lens_cpu_upper_bound=ends,
        )


def find_windowed(layers: Sequence[Any]) -> frozenset[int]:
    """The layers with a sliding window; raises where layers differ in more than our passes can do.

    A pass describes its rows to vLLM's backend once for all layers, and the gate looks at what full layers ask for.
    """
    if len({layer.get_attn_backend() for layer in layers}) > 1:
        raise SemBlendError("the layers attend by several backends", hint="such models run without reuse")
    windowed = frozenset(number for number, layer in enumerate(layers) if getattr(layer, "sliding_window", None))
    if len(windowed) == len(layers):
        raise SemBlendError("no layer has full attention", hint="such models run without reuse")
    return windowed


ROTATION_ERROR = 0.05
"""Far above rounding (0.01 in bfloat16), and far below what any other frequency or pairing gives."""
Rotate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""How a layer of vLLM's rotates queries and keys, ``[n, heads * size]`` each, at their positions."""


@contextmanager
def keep_rotation_tables(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Puts back the tables of cosines that vLLM's rotation replaces where it is called outside of compiled code.

    It does so where a table has another type than the queries (gpt-oss). Compiled code and CUDA graphs of vLLM's go on
    with the table that they were made with: they would read the new one's memory as numbers of the old type.
    """
    held = [(module, dict(module._buffers)) for module in modules]
    try:
        yield
    finally:
        for module, tables in held:
            module._buffers.update(tables)


def check_rotation(
    rotaries: Sequence[Rotate | None], layers: Sequence[Any], rope: RopeSpec, longest: int, like: Tensor
) -> None:
    """Raise where a layer rotates a key to another place than we do: what we know of a family is held against
    transformers, and a config may say something that only vLLM's class reads.

    ``rotaries``: None for a layer of which it is not known. ``like``: the type of keys, and where they are.
    """
    here, far, generator = torch.arange(2, device=like.device), longest - 4, torch.Generator().manual_seed(0)
    for number, (rotate, layer) in enumerate(zip(rotaries, layers, strict=True)):
        ours = rope.of_layer(number)
        if rotate is None or not any(ours.inv_freq):  # a layer that does not rotate may have the module all the same
            continue
        shape = (len(here), layer.num_kv_heads, layer.head_size)
        key = torch.randn(shape, generator=generator).to(like)
        query = torch.zeros(len(here), layer.num_heads * layer.head_size).to(like)
        try:
            turned = (rotate(at, query.clone(), key.flatten(1).clone())[1].view(shape) for at in (here, here + far))
            first, last = turned
        except Exception as error:  # a module of another kind; the canary looks at every load all the same
            log.info("SemBlend could not see how layer %d rotates: %s", number, error)
            return
        off = float((ours.relocate(first, far) - last).abs().max() / last.abs().max())
        if not off < ROTATION_ERROR:
            why = f"keys of layer {number} are rotated otherwise by vLLM than by us (off by {off:.2g})"
            raise SemBlendError(why, hint="such models run without reuse")


def check_caches(names: Sequence[str], caches: Sequence[Tensor], layers: Sequence[Any]) -> torch.dtype | None:
    """The type of 8 bits in the caches; None where they hold wide numbers. Raise where they are not one plain tensor a
    layer; the scheduler's side cannot see that.

    A checkpoint may ask for a quantised KV cache on its own, and a model for layers that read other layers' KV.
    """
    narrow = None
    for name, cache, layer in zip(names, caches, layers, strict=True):
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            raise SemBlendError(f"{name} shares the KV of another layer", hint="such models run without reuse")
        narrow = NARROW_TYPES.get(str(getattr(layer, "kv_cache_dtype", "auto")))
        wanted = (torch.float32, torch.float16, torch.bfloat16) if narrow is None else (torch.uint8, narrow)
        if not isinstance(cache, Tensor) or cache.dtype not in wanted:
            kind = getattr(cache, "dtype", type(cache).__name__)
            raise SemBlendError(f"KV of type {kind} cannot be moved", hint="--kv-cache-dtype fp8, or no quantised KV")
        if narrow is not None:
            check_scales(layer)
    return narrow


def read_layer_spec(group: Any, names: Sequence[str]) -> Any:
    """What vLLM knows of the cache of each of these layers of a group. Those of a draft may be of other sizes."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    if specs is None:
        return group.kv_cache_spec
    first, *others = (specs[name] for name in names)
    if any((one.block_size, one.dtype) != (first.block_size, first.dtype) for one in others):
        raise SemBlendError("the layers have blocks of different lengths", hint="such models run without reuse")
    return first


def list_kinds(group: Any, names: Sequence[str], layers: Sequence[Any]) -> list[tuple[Any, list[str]]]:
    """The layers by what a description of a pass says of them, with what vLLM knows of their cache: by their windows,
    where it knows them one by one, and by their heads."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None) or dict.fromkeys(names, group.kv_cache_spec)
    kinds: dict[Any, list[str]] = {}
    for name, layer in zip(names, layers, strict=True):
        heads = (layer.num_heads, layer.num_kv_heads, layer.head_size)
        kinds.setdefault((getattr(specs[name], "sliding_window", None), heads), []).append(name)
    return [(specs[same[0]], same) for same in kinds.values()]


def read_rope_config(vllm_config: Any) -> Mapping[str, Any]:
    """The model's configuration as our rotation reads it; requests with images are none of ours.

    Of models with latents vLLM renames the scaling: both names stand for YaRN's angles. LongRoPE's factors it chooses
    once, by the longest prompt that it takes.
    """
    found = dict(read_for_text(vllm_config.model_config.hf_text_config.to_dict()))
    found[LONGEST] = vllm_config.model_config.max_model_len
    rope = found.get("rope_parameters") or {}
    if rope.get("rope_type") in ("deepseek_yarn", "deepseek_llama_scaling"):
        found["rope_parameters"] = {**rope, "rope_type": "yarn"}
    return found
