"""Engines that need a process of their own, because vLLM has one connector and one model a process.

``python apart.py SCENARIO SETTINGS ANSWER``: settings and answer are JSON files. The tests `begin` it, mostly through
the fixture ``apart``.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from forks import fork
from late_outputs import schedule_ahead

WORDS = ["amber", "basin", "cedar", "delta", "ember", "flint", "grove", "harbor", "island", "jungle"]
OURS = {
    "kv_connector": "SemBlendConnectorV1",
    "kv_connector_module_path": "semblend.integration.vllm.connector_v1",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"quality": "fast"},
}


class Engine:
    def __init__(self, model: str, transfer: dict[str, Any] | None, **more: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        settings: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_batched_tokens": 1024,
            "kv_cache_memory_bytes": 160 << 20,
            "max_num_seqs": 4,
            "block_size": 32,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "kv_transfer_config": KVTransferConfig(**transfer) if transfer else None,
        }
        self.llm = LLM(model=model, **settings | more)
        self._tokenizer = self.llm.get_tokenizer()
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler

    def prompt(self, lead: str, seed: int) -> list[int]:
        chance = random.Random(seed)
        words = " ".join(f"{chance.choice(WORDS)} {chance.randint(10, 99)}" for _ in range(60))
        parts = (f"<|im_start|>system\n{lead}<|im_end|>\n<|im_start|>user\n", words, "\nWhat comes first?<|im_end|>\n")
        return [token for part in parts for token in self._tokenizer.encode(part, add_special_tokens=False)]

    def ask(
        self, prompt: list[int], *, lora: Any = None, transfer: dict[str, Any] | None = None, **asked: Any
    ) -> dict[str, Any]:
        from vllm import SamplingParams

        wishes = (transfer or {}) | ({"semblend": asked} if asked else {})
        extra = {"kv_transfer_params": wishes} if wishes else None
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra_args=extra)
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False, lora_request=lora)
        return {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "prompt": len(prompt),
            "receipt": (output.kv_transfer_params or {}).get("semblend"),
        }

    def forget_prefixes(self) -> None:
        """Empty vLLM's own cache, behind our back: what people call drops donors too."""
        assert self.scheduler.kv_cache_manager.reset_prefix_cache()
        connector = self.scheduler.connector
        for part in getattr(connector, "_connectors", (connector,)):
            half = getattr(part, "_scheduler", None)
            if half is not None:
                half.donors.resets.was_reset()


def _example(storage: Path) -> tuple[dict[str, Any], Callable[[], int]]:
    """A connector that stores prompts in files, and how many it has."""
    told = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    return told, lambda: len(list(storage.iterdir()))


def _lmcache() -> tuple[dict[str, Any], Callable[[], int]]:
    """LMCache, and how many chunks it has stored."""
    import lmcache_blocks

    os.environ.update(lmcache_blocks.SETTINGS)
    lmcache_blocks.install()
    return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}, lambda: len(lmcache_blocks.STORED)


def beside(settings: dict[str, Any]) -> dict[str, Any]:
    """A donor, a prompt that shares its document, the same prompts again with vLLM's own cache empty."""
    if settings.get("unguarded"):
        from semblend.integration.vllm import refusals

        refusals.is_of_vllm = lambda multi_connector: False
        refusals._refuse_neighbours = lambda multi_connector, package: None
    other, stored = _lmcache() if settings.get("lmcache") else _example(Path(settings["storage"]))
    ours_settings = {"quality": "fast", "donor_min_new_tokens": 8}  # of what the other one brings little is new
    parts = [OURS | {"kv_connector_extra_config": ours_settings}, other]
    parts = parts if settings["ours_first"] else parts[::-1]
    transfer = {**settings["outer"], "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": parts}}
    engine = Engine(settings["model"], transfer)
    connector = engine.scheduler.connector
    (ours,) = [part for part in connector.sub_connectors if type(part).__name__ == "SemBlendConnectorV1"]
    donor, target = engine.prompt("You are brief.", 1), engine.prompt("You are an archivist and careful.", 1)
    told: dict[str, Any] = {"stored": [], "policy": engine.scheduler.recompute_kv_load_failures}

    def step(name: str, prompt: list[int], **asked: Any) -> None:
        told[name] = engine.ask(prompt, **asked)
        told["stored"].append(stored())
        engine.forget_prefixes()

    step("donor", donor)
    step("shifted", target)
    step("without us", target, opt_out=True)
    step("without us again", target, opt_out=True)
    step("donor again", donor)
    handed_on = engine.prompt("You prefill for another engine.", 1)
    told["handed on"] = engine.ask(handed_on, transfer={"do_remote_decode": True})
    told["stored of it"] = stored() - told["stored"][-1]
    engine.forget_prefixes()
    told["donors"] = len(ours._ours.semblend.donors())
    told["reset"] = connector.reset_cache()
    told["donors after reset"] = len(ours._ours.semblend.donors())
    told["records"] = len(ours._ours._records)
    told["hidden"] = len(getattr(connector, "_hidden", ()))
    told["totals"] = dict(ours._ours.semblend.totals().tokens)
    if settings.get("failing"):
        told |= _load_in_one_step(engine) | _fail_to_load(engine, connector, ours._ours)
    return told


def _watch_loads(log: list[str]) -> Any:
    """Both parts of the worker write down what they load; returns the other one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group = get_kv_transfer_group()
    (other,) = [part for part in group._connectors if part is not group._ours]
    load, start = group._ours._worker.load, other.start_load_kv

    def load_ours(orders: Any) -> None:
        log.extend("ours" for _ in orders.loads)
        load(orders)

    def load_other(context: Any, **named: Any) -> None:
        log.extend("other" for request in other._get_connector_metadata().requests if not request.is_store)
        start(context, **named)

    group._ours._worker.load, other.start_load_kv = load_ours, load_other
    return other


def _load_in_one_step(engine: Engine) -> dict[str, Any]:
    """A request whose prefix the other connector loads, and in the same step one with that prefix and a document of
    ours behind it."""
    from vllm import SamplingParams

    preface, document = engine.prompt("You open every answer with a preface.", 7), engine.prompt("You are brief.", 6)
    engine.ask(document)
    engine.ask(preface)
    engine.forget_prefixes()
    log: list[str] = []
    _watch_loads(log)
    given = [{"prompt_token_ids": prompt} for prompt in (preface, preface[:128] + document[20:])]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    first, second = engine.llm.generate(given, params, use_tqdm=False)
    engine.forget_prefixes()
    return {"loads": log, "first": first.num_cached_tokens, "second": second.kv_transfer_params["semblend"]}


def _fail_to_load(engine: Engine, connector: Any, half: Any) -> dict[str, Any]:
    """The other connector writes noise where it should load a prompt, and says so; then a prompt that shares it."""
    import torch

    prompt, behind = engine.prompt("You are never loaded.", 5), engine.prompt("You are an archivist and careful.", 5)
    told = {"cold": engine.ask(prompt)}
    engine.forget_prefixes()
    connector.reset_cache()
    other, invalid = _watch_loads([]), set()

    def fail(context: Any, **named: Any) -> None:
        for request in other._get_connector_metadata().requests:
            blocks = sorted({int(slot) // 32 for slot in request.slot_mapping})
            if not request.is_store:
                invalid.update(blocks)
                for layer in context.no_compile_layers.values():
                    if (cache := getattr(layer, "kv_cache", None)) is not None:
                        cache[blocks] = torch.randn_like(cache[blocks])

    def take_invalid() -> set[int]:
        taken = set(invalid)
        invalid.clear()
        return taken

    other.start_load_kv, other.get_block_ids_with_load_errors = fail, take_invalid
    told["failed"] = engine.ask(prompt)
    told["donors of it"] = [donor.donor_id for donor in half.semblend.donors()]
    engine.forget_prefixes()
    told["behind it"] = engine.ask(behind)
    engine.forget_prefixes()
    told["behind it, cold"] = engine.ask(behind, opt_out=True)
    return told


def beside_offloading(settings: dict[str, Any]) -> dict[str, Any]:
    """Donors and prompts that share their documents, in so few blocks that each takes those of the one before it, while
    vLLM's OffloadingConnector has not copied them yet. Then each donor again, from what it has copied."""
    import slow_offload
    from vllm import SamplingParams

    other = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "SlowOffloadingSpec", "spec_module_path": "slow_offload"},
    }
    transfer = {**settings["outer"], "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [other, OURS]}}
    # Before 0.30 vLLM cannot count for several connectors where everything is in one process.
    few = {"max_model_len": 384, "num_gpu_blocks_override": 13, "disable_log_stats": True}
    engine = Engine(settings["model"], transfer, **few)
    (worker,) = slow_offload.WORKERS
    told: dict[str, Any] = {"policy": engine.scheduler.recompute_kv_load_failures, "pairs": []}
    for seed in (1, 2, 3):
        donor = engine.ask(engine.prompt("You are brief.", seed))
        shifted = engine.ask(engine.prompt("You are an archivist and careful.", seed))
        told["pairs"].append({"donor": donor, "shifted": shifted})
    # One that we serve grows by blocks while others end and give theirs back.
    prompts = [engine.prompt("You are a clerk.", 3)[:200]] + [engine.prompt(f"Short {n}.", 9 + n)[:70] for n in (1, 2)]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (100, 2, 12)]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.llm.generate(given, params, use_tqdm=False)
    told["grown"] = [(output.kv_transfer_params or {}).get("semblend", {}).get("reused_tokens") for output in outputs]
    worker.slow = False
    engine.ask(engine.prompt("You say nothing.", 4)[:40])
    for pair, seed in zip(told["pairs"], (1, 2, 3), strict=True):
        engine.forget_prefixes()
        pair["donor again"] = engine.ask(engine.prompt("You are brief.", seed))
    told |= {"stored": worker.stored, "flushed": worker.flushed, "torn": worker.torn}
    told["hidden"] = len(engine.scheduler.connector._hidden)
    return told


def lora(settings: dict[str, Any]) -> dict[str, Any]:
    """The same questions to the model and to an adapter, in an engine with LoRA."""
    from vllm.lora.request import LoRARequest

    engine = Engine(
        settings["model"], OURS if settings["connected"] else None, enable_lora=True, max_loras=1, max_lora_rank=8
    )
    adapter = LoRARequest("tiny", 1, settings["adapter"])
    told: dict[str, Any] = {}
    for name, lead in (("first", "You are brief."), ("second", "You are an archivist and careful.")):
        told[f"base {name}"] = engine.ask(engine.prompt(lead, 1))
        told[f"adapter {name}"] = engine.ask(engine.prompt(lead, 1), lora=adapter)
    if settings["connected"]:
        half = engine.scheduler.connector._ours
        told["refusal"], told["donors"] = half.facts.refusal, len(half.semblend.donors())
    return told


def number_type(settings: dict[str, Any]) -> dict[str, Any]:
    """A donor, and a prompt that shares its document: cold, fast, balanced, and cold again from vLLM's own cache."""
    import small_folders

    model = settings["model"]
    if "kind" in settings:
        model = str(small_folders.write(settings["kind"], Path(settings["folder"]), model))
    transfer = OURS if settings.get("connected", True) else None
    engine = Engine(model, transfer, dtype=settings["dtype"], kv_cache_dtype=settings.get("kv", "auto"))
    target = engine.prompt("You are an archivist and careful.", 1)
    told = {"cold": engine.ask(target, opt_out=True)}
    if transfer is None:
        return told
    engine.forget_prefixes()
    told["donor"] = engine.ask(engine.prompt("You are brief.", 1))
    for mode in ("fast", "balanced"):
        engine.forget_prefixes()
        told[mode] = engine.ask(target, quality=mode)
    told["cold again"] = engine.ask(target, opt_out=True)
    return told


def unknown_version(settings: dict[str, Any]) -> dict[str, Any]:
    """A vLLM of tomorrow: another number, and a name that we import is gone."""
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    vllm.__version__ = "0.99.0"
    del base.KVConnectorWorkerMetadata
    return as_without_us({**settings, "connected": True})


def _share(settings: dict[str, Any]) -> Engine:
    """An engine that shares donors in a directory."""
    options = {"quality": "fast", "donor_directory": settings["directory"], "donor_bits": settings.get("bits", 16)}
    return Engine(settings["model"], OURS | {"kv_connector_extra_config": options})


def publish(settings: dict[str, Any]) -> dict[str, Any]:
    """A donor in the directory, then more of them without end, until somebody ends the process."""
    engine = _share(settings)
    seed = 1
    while True:
        engine.ask(engine.prompt("You are brief.", seed))
        seed += 1
        if any(name.endswith(".kv") for name in os.listdir(settings["directory"])):
            Path(settings["published"]).touch()


def reuse(settings: dict[str, Any]) -> dict[str, Any]:
    """A prompt that shares a document with a neighbour's donor: from the directory with the very first request, cold,
    from the directory again, and from damaged files."""
    engine = _share(settings)
    target = engine.prompt("You are an archivist and careful.", 1)
    told: dict[str, Any] = {"first": engine.ask(target)}
    engine.forget_prefixes()
    told["cold"] = engine.ask(target, opt_out=True)
    engine.forget_prefixes()
    told["shared"] = engine.ask(target)
    engine.forget_prefixes()
    told["cold again"] = engine.ask(target, opt_out=True)
    engine.forget_prefixes()
    for path in Path(settings["directory"]).glob("*.kv"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    told["damaged"] = engine.ask(target)
    told["left"] = sorted(path.suffix for path in Path(settings["directory"]).iterdir())
    return told


def as_without_us(settings: dict[str, Any]) -> dict[str, Any]:
    """Prompts that share a document, each twice, in an engine of a kind that we decline."""
    import small_folders

    folder = small_folders.write(settings["kind"], Path(settings["folder"]), settings["model"])
    by_name = {key: value for key, value in OURS.items() if key != "kv_connector_module_path"}
    # States are kept at the ends of prompts, not at every block: the kernels for a CPU know nothing else.
    more = {"mamba_cache_mode": "align"} if settings["kind"] == "recurrent" else {}
    with schedule_ahead() if settings.get("ahead") else nullcontext():
        engine = Engine(str(folder), by_name if settings["connected"] else None, **more)
    scheduler = engine.scheduler
    told: dict[str, Any] = {
        "groups": [type(group.kv_cache_spec).__name__ for group in scheduler.kv_cache_config.kv_cache_groups],
        "hybrid manager is off": scheduler.vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
        "blocks": scheduler.kv_cache_config.num_blocks,
        "schedules ahead": type(scheduler).__name__ == "AsyncScheduler",
        "delays freeing": scheduler.defer_block_free,
        "answers": [],
    }
    for lead in ("You are brief.", "You are an archivist and careful.", "You are brief."):
        prompt = engine.prompt(lead, 1)
        told["answers"] += [engine.ask(prompt), engine.ask(prompt)]
    told["reset"] = engine.llm.reset_prefix_cache()
    told["answers"].append(engine.ask(engine.prompt("You are brief.", 1)))
    if settings["connected"]:
        half = scheduler.connector._ours
        told["refusal"], told["donors"] = half.facts.refusal, len(half.semblend.donors())
        told["records"] = len(half._records)
    return told


def ranks(settings: dict[str, Any]) -> list[dict[str, Any]]:
    import tensor_parallel

    return tensor_parallel.ask_all(settings["ranks"], Path(settings["folder"]))


def failing_rank(settings: dict[str, Any]) -> None:
    import failing_rank as script

    script.fail(settings["rank"], Path(settings["folder"]))


def tell(scenario: str, given: str, answer: str) -> None:
    scenarios: dict[str, Callable[[dict[str, Any]], Any]] = {
        "beside": beside,
        "beside_offloading": beside_offloading,
        "lora": lora,
        "number_type": number_type,
        "as_without_us": as_without_us,
        "unknown_version": unknown_version,
        "publish": publish,
        "reuse": reuse,
        "ranks": ranks,
        "failing_rank": failing_rank,
    }
    told = scenarios[scenario](json.loads(Path(given).read_text()))
    Path(answer).write_text(json.dumps(told))


def begin(scenario: str, given: Path, answer: Path, log: Path, library: str = "") -> BaseProcess:
    """``library``: a folder whose packages are found first."""
    files = str(given), str(answer)
    found = os.pathsep.join(filter(None, (library, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, __file__, scenario, *files]
    return fork(lambda: tell(scenario, *files), command, log, os.environ | {"PYTHONPATH": found})


if __name__ == "__main__":
    tell(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # LMCache's threads never end
