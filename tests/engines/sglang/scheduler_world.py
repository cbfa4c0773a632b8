"""A real SGLang scheduler in the process of the tests: requests go in, steps are made by hand, answers come out."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

WORDS = ("amber", "basin", "cedar", "delta", "ember", "flint", "grove", "harbor", "island", "jungle", "kettle")
POOL_TOKENS = 6144


@dataclass
class Answer:
    """What became of a request."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    done: bool = False


class SchedulerWorld:
    """The scheduler, our cache in it, and what was seen of them."""

    def __init__(self, model: str, backend: str = "semblend", **flags: Any) -> None:
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs
        from transformers import AutoTokenizer

        from semblend.integration.sglang.plugin import register

        load_plugins()
        register()
        given = {
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_overlap_schedule": True,
            "disable_cuda_graph": True,
            "skip_server_warmup": True,
            "context_length": 2048,
            "max_total_tokens": POOL_TOKENS,
            "max_running_requests": 8,
            "chunked_prefill_size": 512,
        }
        args = ServerArgs(model_path=model, radix_cache_backend=backend, **(given | flags))
        publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        self.scheduler = Scheduler(args, PortArgs.init_new(args))
        self.cache = self.scheduler.tree_cache
        self.sessions = getattr(self.cache, "_sessions", None)  # None in a stock cache
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.answers: dict[str, Answer] = {}
        self.events: list[Any] = []
        self._count = 0
        self.count_steps_of_load = 0
        self._watch_answers()
        if self.sessions is not None:
            from semblend.confirm.sinks import CallbackSink, EventStream

            stream = EventStream([CallbackSink(self.events.append)])
            self.sessions.semblend.events = self.sessions.semblend._reporter._stream = stream
            self._watch_loads()

    @property
    def model(self) -> Any:
        return self.sessions._model

    # -- prompts -----------------------------------------------------------------------------------------------------

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def document(self, seed: int, items: int = 48) -> list[int]:
        rng = random.Random(seed)
        return self.ids("\n" + " ".join(f"{rng.choice(WORDS)} {rng.randint(10, 99)}" for _ in range(items)) + ".\n")

    def instruction(self, number: int) -> list[int]:
        text = f"<|im_start|>system\nYou are assistant number {number}. " + "Be brief. " * (number % 7)
        return self.ids(text + "<|im_end|>\n<|im_start|>user\n")

    def question(self, text: str = "What is the first word?") -> list[int]:
        return self.ids(f"{text}<|im_end|>\n<|im_start|>assistant\n")

    # -- requests ----------------------------------------------------------------------------------------------------

    def send(self, prompt: list[int], *, tokens: int = 4, salt: str | None = None, **asked: Any) -> str:
        """Put a request into SGLang's queue; ``asked`` is what it says about reuse."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._count += 1
        name = f"request-{self._count}"
        params = SamplingParams(
            max_new_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            custom_params={"semblend": asked} if asked else None,
        )
        params.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=name,
            input_text=None,
            input_ids=array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            extra_key=salt,
        )
        self.answers[name] = Answer(name)
        self.scheduler.process_input_requests([request])
        return name

    def ask(self, *prompts: list[int], **asked: Any) -> list[Answer]:
        """Send all of them at once, and step until all are answered."""
        names = [self.send(prompt, **asked) for prompt in prompts]
        while not all(self.answers[name].done for name in names):
            self.step()
        self.settle()
        return [self.answers[name] for name in names]

    def cold(self, prompt: list[int], **asked: Any) -> Answer:
        """Computed by SGLang alone: nothing of ours, nothing from its tree, and nothing kept of it."""
        self.forget_prefixes()
        (answer,) = self.ask(prompt, opt_out=True, **asked)
        self.forget_prefixes()
        return answer

    def abort(self, name: str) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.abort_request(AbortReq(rid=name))
        self.answers[name].done = True

    # -- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One turn of SGLang's own loop; whether it had a batch to run."""
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        else:
            scheduler.on_idle()
        scheduler.last_batch = batch
        return bool(batch)

    def settle(self) -> None:
        """Step until nothing is under way; SGLang then checks its own books and raises for a slot that is missing."""
        while self.step() or self.scheduler.waiting_queue:
            pass

    def flush(self) -> None:
        """Empty SGLang's tree, and with it our donors."""
        self.settle()
        assert self.scheduler.flush_cache()

    def forget_prefixes(self) -> None:
        """Empty SGLang's tree behind our back: donors stay."""
        self.settle()
        reset, self.sessions.reset = self.sessions.reset, lambda: None
        try:
            assert self.scheduler.flush_cache()
        finally:
            self.sessions.reset = reset

    @contextmanager
    def shrink_pool(self, tokens: int) -> Iterator[None]:
        """As if SGLang's pool held so many tokens: the others are put aside, and its books know nothing of them.

        Not to be flushed meanwhile. Whoever still waits at the end is aborted.
        """
        self.flush()
        allocator, more = self.scheduler.token_to_kv_pool_allocator, self.count_free() - tokens
        aside, books = allocator.alloc(more), self.scheduler.invariant_checker
        books.max_total_num_tokens -= more
        try:
            yield
        finally:
            for name, answer in self.answers.items():
                if not answer.done:
                    self.abort(name)
            while self.scheduler.running_batch.reqs:
                self.step()
            allocator.free(aside)
            books.max_total_num_tokens += more

    def step_until_answered(self, *names: str, most: int = 300, check: bool = False) -> int:
        """Steps until all of them are answered, or ``most`` of them; ``check`` has SGLang look at its books each time.

        Returns the steps that were made; as many as ``most`` where somebody is stuck.
        """
        for steps in range(most):
            if all(self.answers[name].done for name in names):
                return steps
            self.step()
            if check:
                self.scheduler.invariant_checker.self_check_during_busy()
        return most

    def count_free(self) -> int:
        """Slots that neither a request nor the tree holds."""
        return int(self.scheduler.token_to_kv_pool_allocator.available_size())

    def exact_hit(self, prompt: list[int], salt: str | None = None) -> int:
        """Tokens of a prompt that SGLang's exact tree holds."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return int(self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt), salt))).device_prefix_len)

    def read_tree(self, prompt: list[int]) -> list[Any]:
        """Keys and values of every layer that the exact tree holds of a prompt."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", prompt))))
        slots = self.cache.path_device_indices(found.last_device_node)
        layout = self.model.layout
        return [tuple(part.clone() for part in layout.gather(layer, slots)) for layer in range(layout.layers)]

    def poison_donors(self) -> None:
        """Overwrite the KV of every donor with noise, as a broken machine would."""
        import torch

        for donor_id, generation in list(self.sessions.donors.generations.items()):
            held = self.sessions.donors.kv.acquire(donor_id, generation)
            held.k.copy_(torch.randn_like(held.k) * 3)
            held.v.copy_(torch.randn_like(held.v) * 3)
            self.sessions.donors.kv.release(held)

    def receipt(self, answer: Answer) -> Any:
        found = [event.fields.get("receipt") for event in self.events if event.request_id == answer.request_id]
        (receipt,) = [one for one in found if one is not None]
        return receipt

    def _watch_loads(self) -> None:
        """Count the steps that the last load took."""
        load, work = self.sessions.load, self.sessions.work

        def begin(request_id: str, *args: Any) -> None:
            if not self.sessions.find(request_id).is_loading:
                self.count_steps_of_load = 0
            load(request_id, *args)

        def go_on(request_id: str, *, busy: bool) -> Any:
            self.count_steps_of_load += 1
            return work(request_id, busy=busy)

        self.sessions.load, self.sessions.work = begin, go_on

    def _watch_answers(self) -> None:
        """Requests as SGLang finishes them, before their output goes to another process that does not exist here."""
        from sglang.srt.managers import schedule_batch

        world, check = self, schedule_batch.Req.update_finish_state

        def look(req: Any, *args: Any, **more: Any) -> Any:
            found = check(req, *args, **more)
            answer = world.answers.get(req.rid)
            if answer is not None and req.finished():
                answer.tokens, answer.cached, answer.done = list(req.output_ids), int(req.cached_tokens), True
            return found

        schedule_batch.Req.update_finish_state = look
