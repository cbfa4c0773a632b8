"""semblend 0.3.25's patch of SGLang's radix cache, driven by its own hooks; with ``--probe``, what is left of them.

Run by `bench/sglang_peer.py` in an environment that has SGLang, with the folder of semblend 0.3.25 on PYTHONPATH, and
before it the folder of an older SGLang where the hooks are to be driven. Every donor is a finished request whose KV
lies in slots of its own, so a slot says whose token's KV it holds. A query is what SGLang asks when a request comes.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class Slots:
    """Gives slots in order and frees none: the allocator of the cache."""

    device = torch.device("cpu")

    def free(self, *_: Any, **__: Any) -> None: ...


class Vectors:
    """The package's own MiniLM embeddings, made beforehand, by token ids."""

    def __init__(self, vectors: dict[str, list[float]]) -> None:
        self._vectors = {name: torch.tensor(vector).numpy() for name, vector in vectors.items()}

    def find(self, token_ids: list[int]) -> Any:
        return self._vectors.get(name_of(token_ids))


def name_of(token_ids: Any) -> str:
    return " ".join(map(str, token_ids))


def allow_known_configs() -> None:
    """An older SGLang registers model types that this transformers knows itself."""
    from transformers.models.auto import configuration_auto

    register = configuration_auto._LazyConfigMapping.register

    def replace(self: Any, key: str, value: Any, **_: Any) -> None:
        register(self, key, value, exist_ok=True)

    configuration_auto._LazyConfigMapping.register = replace


def drive(cases: dict[str, Any]) -> dict[str, Any]:
    """Donors finish, queries come; which slots each query is handed."""
    from semblend.integration.sglang.radix_patcher import patch_radix_cache

    patch_radix_cache()
    from sglang.srt.mem_cache import radix_cache
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    longest = max(len(donor["tokens"]) for donor in cases["donors"])
    rows = SimpleNamespace(req_to_token=torch.zeros((1, longest), dtype=torch.int64), free=lambda *_: None)
    cache = radix_cache.RadixCache(
        CacheInitParams(disable=False, req_to_token_pool=rows, token_to_kv_pool_allocator=Slots(), page_size=1)
    )
    vectors = Vectors(cases["vectors"])
    cache._embed_tokens = vectors.find
    owners: list[tuple[str, int]] = []  # of each slot: the donor and the place in it
    for donor in cases["donors"]:
        count = len(donor["tokens"])
        rows.req_to_token[0, :count] = torch.arange(len(owners), len(owners) + count)
        owners += [(donor["id"], at) for at in range(count)]
        cache.cache_finished_req(make_request(donor["tokens"], cache.root_node))
    found = []
    for query in cases["queries"]:
        key = radix_cache.RadixKey(list(query["tokens"]), None)
        exact = len(type(cache).__mro__[1].match_prefix(cache, MatchPrefixParams(key=key)).device_indices)
        before = dict(cache.get_semblend_stats())
        result = cache.match_prefix(MatchPrefixParams(key=key))
        semantic = cache.get_semblend_stats()["semantic_hits"] - before["semantic_hits"]
        found.append({"id": query["id"], "exact": exact, "semantic": semantic,
                      "slots": [owners[slot] for slot in result.device_indices.tolist()]})  # fmt: skip
    return {"queries": found, "stats": cache.get_semblend_stats()}


def make_request(tokens: list[int], root: Any) -> Any:
    """A finished request, as far as the cache looks at it."""
    return SimpleNamespace(
        origin_input_ids=list(tokens), output_ids=[], req_pool_idx=0, extra_key=None, cache_salt=None, priority=0,
        cache_protected_len=0, last_node=root, pop_committed_kv_cache=lambda: len(tokens),
    )  # fmt: skip


def name_class(queue: Any) -> None:
    from sglang.srt.mem_cache import radix_cache

    queue.put(radix_cache.RadixCache.__name__)


def probe(cases: dict[str, Any]) -> dict[str, Any]:
    """What the patch meets in this SGLang, hook by hook."""
    from sglang.srt.mem_cache import radix_cache
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    stock = radix_cache.RadixCache
    from semblend.integration.sglang.radix_patcher import patch_radix_cache

    patch_radix_cache()
    facts: dict[str, Any] = {
        "the patch reports success": radix_cache.RadixCache is not stock,
        "SGLang's default cache is of the patched class": issubclass(UnifiedRadixCache, radix_cache.RadixCache),
        "SGLang still calls cache_finished_req": hasattr(stock, "cache_finished_req"),
    }
    context = multiprocessing.get_context("spawn")  # as SGLang starts its scheduler
    queue = context.Queue()
    process = context.Process(target=name_class, args=(queue,))
    process.start()
    facts["a spawned process has the patched class"] = queue.get(timeout=240) != "RadixCache"
    process.join()

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("semblend.sglang.radix")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    cache = radix_cache.RadixCache.create_simulated(mock_allocator=Slots())
    cache._embed_tokens = Vectors(cases["vectors"]).find
    donor, query = cases["donors"][0], cases["queries"][0]
    tokens = array("q", donor["tokens"])
    cache.insert(InsertParams(key=radix_cache.RadixKey(tokens, None), value=torch.arange(len(tokens))))
    try:
        cache.cache_finished_req(make_request(donor["tokens"], cache.root_node))
        facts["cache_finished_req of the patched class"] = "works"
    except AttributeError as error:
        facts["cache_finished_req of the patched class"] = f"AttributeError: {error}"
    cache._register_donor_from_req((make_request(donor["tokens"], cache.root_node),), {})
    cache.match_prefix(MatchPrefixParams(key=radix_cache.RadixKey(array("q", query["tokens"]), None)))
    facts["a donor that is registered by hand, when it is looked up"] = next(
        (line for line in lines if "failed" in line or "hit" in line or "declined" in line), "no word about it"
    )
    facts["hits by its own count"] = cache.get_semblend_stats()["semantic_hits"]
    return facts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--probe", action="store_true")
    args = parser.parse_args()
    allow_known_configs()
    import sglang

    cases = json.loads(Path(args.cases).read_text())
    found = probe(cases) if args.probe else drive(cases)
    Path(args.out).write_text(json.dumps({"sglang": sglang.__version__, "found": found}))


if __name__ == "__main__":
    main()
