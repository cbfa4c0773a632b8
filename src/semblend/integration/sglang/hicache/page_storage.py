"""`SemBlendPages`: a HiCache storage backend. SGLang's exact pages outlive evictions and restarts, checksummed.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "semblend", "module_path": "semblend.integration.sglang.hicache.page_storage",
      "class_name": "SemBlendPages", "directory": "/var/cache/semblend", "max_bytes": 100000000000}'

SGLang's keys are SHA-256 hashes of all tokens up to the end of a page, with ``extra_key`` and ``cache_salt`` in front,
so a page is found by the same text in the same namespace only. SGLang does not put model, weights, shapes or number
types into its keys; they are part of where we look. New weights in a running engine end storing and fetching: SGLang
may still have pages of the old ones under way.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName
from torch import Tensor

from semblend.errors import ConfigError
from semblend.integration.sglang.plugin import find_runner
from semblend.integration.sglang.settings import read_page_options
from semblend.materialize.donors.store import PageFiles
from semblend.materialize.weights_watch import WeightsWatch

SERVED_POOLS = ("MHATokenToKVPoolHost",)
RANKS = ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size", "dp_rank")

log = logging.getLogger("sglang.semblend")


class SemBlendPages(HiCacheStorage):
    """The pages of one rank. SGLang makes it, tells it the host pool, and then asks from its own threads."""

    def __init__(self, storage_config: Any, options: Mapping[str, Any] | None = None) -> None:
        del options  # SGLang hands none over
        self._config = storage_config
        self._files: PageFiles | None = None
        self._watch: WeightsWatch | None = None
        self.options = read_page_options(storage_config.extra_config or {})

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the folder: only the host pool says how a page looks."""
        super().register_mem_pool_host(mem_pool_host)
        if (why := explain_refusal(self._config, mem_pool_host)) is not None:
            raise ConfigError(
                f"SemBlend cannot store the pages of this engine: {why}", hint="see docs/guides/sglang.md"
            )
        folder, most = self.options.directory, self.options.max_bytes
        if not self.options.weights:
            self._watch = watch_weights()
        weights = self.options.weights if self._watch is None else self._watch.digest
        self._files = PageFiles(folder, describe_pages(self._config, mem_pool_host, weights), most)
        log.info("SemBlend keeps HiCache pages in %s, at most %.1f GB", folder, most / 1e9)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if host_pool_name != PoolName.KV:
            raise ConfigError(
                f"SemBlend stores keys and values only, and this engine has a pool {host_pool_name} too",
                hint="take another --hicache-storage-backend for this model",
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    # -- what SGLang asks --------------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """How many pages at the beginning are stored; none where the folder cannot be asked."""
        del extra_info
        with _say_failure("asked"):
            files = self._find_files()
            if files is not None:
                return next((at for at, key in enumerate(keys) if not files.holds(key)), len(keys))
        return 0

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        """Fill ``target_location`` with a page; None where it is not here, or damaged."""
        del target_sizes
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Tensor | None]:
        """Pages as far as they are here without a gap: SGLang can use nothing behind one."""
        del target_sizes
        pages: list[Tensor | None] = [None] * len(keys)
        with _say_failure("read"):
            files = self._find_files()
            for at, (key, target) in enumerate(zip(keys, target_locations or pages, strict=True)):
                if files is None or target is None or not files.read_into(key, target):
                    break
                pages[at] = target
        return pages

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        del target_location, target_sizes
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Whether all were stored; SGLang stores nothing behind a page that was not."""
        del target_locations, target_sizes
        stored = 0
        with _say_failure("written"):
            files = self._find_files()
            for key, value in zip(keys, values, strict=True):
                if files is None or not files.write(key, value):
                    break
                stored += 1
        return stored == len(keys)

    def clear(self) -> None:
        if self._files is not None:
            self._files.clear()

    def close(self) -> None:
        files, self._files = self._files, None
        if files is not None:
            with _say_failure("closed"):
                files.close()

    def _find_files(self) -> PageFiles | None:
        """The folder; None before it is open, and for good after the weights have changed. Looks: once for each batch.

        The folder is not closed then: another thread of SGLang may be reading from it.
        """
        if self._files is not None and self._watch is not None and self._watch.have_changed():
            log.warning("SemBlend: the model has new weights; no HiCache page is stored or fetched until a restart")
            self._files = None
        return self._files


@contextmanager
def _say_failure(what: str) -> Iterator[None]:
    """A folder that fails is a miss: SGLang asks from threads of its own, which an error would end."""
    try:
        yield
    except Exception as error:
        log.warning("SemBlend: HiCache pages could not be %s: %s: %s", what, type(error).__name__, error)


def explain_refusal(config: Any, pool: Any) -> str | None:
    """Why pages of this engine are not stored, in one line; None where they are."""
    if config.is_mla_model:
        return "MLA pages are shared between ranks, and nobody has run that"
    if type(pool).__name__ not in SERVED_POOLS:
        return f"a {type(pool).__name__} was never looked at"
    if config.should_split_heads:
        return "tp_lcm_size cuts pages between ranks, and nobody has run that"
    return None


def watch_weights() -> WeightsWatch:
    runner = find_runner()
    if runner is None:
        raise ConfigError(
            "SemBlend cannot see the model's weights, and must not mix the pages of two models",
            hint="let SGLANG_PLUGINS name semblend, or name the weights yourself: "
            '"weights" in the backend extra config',
        )
    return WeightsWatch(runner.model)


def digest_model_config() -> str | None:
    """Hex digits that stand for the model's configuration: another rotation makes other keys of the same weights."""
    runner = find_runner()
    if runner is None:
        return None
    packed = json.dumps(runner.model_config.hf_text_config.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(packed.encode()).hexdigest()[:32]


def describe_pages(config: Any, pool: Any, weights: str) -> dict[str, Any]:
    """All that must be equal for a page to be usable, besides the tokens that SGLang's key stands for."""
    ranks = {name: value for name, value in asdict(config).items() if name in RANKS}
    return {
        "weights": weights,
        "model": config.model_name,
        "configuration": digest_model_config(),
        "dtype": str(pool.dtype),
        "layout": pool.layout,
        "page_tokens": pool.page_size,
        "layers": pool.layer_num,
        "heads": pool.head_num,
        "head_size": [pool.head_dim, pool.v_head_dim],
        "ranks": ranks,
    }
