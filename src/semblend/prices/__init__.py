"""What memory, GPUs and prefill cost: data that a user can replace. Every number says where it comes from.

The numbers are in ``prices.toml``; a user's file replaces single numbers of it.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from semblend.errors import InputError

TIERS: Final = ("hbm", "dram", "ssd")
BYTES_PER_PARAMETER: Final = 2
WEIGHTS_SHARE: Final = 0.9
"""Of a GPU's memory that weights may take. A model that needs more is spread over twice as many GPUs."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: the price of an hour, GiB of memory, and TFLOP/s of dense bfloat16."""

    name: str
    hour: float
    hour_source: str
    memory_gib: float
    peak_tflops: float
    peak_source: str


@dataclass(frozen=True, slots=True)
class MemoryTier:
    """Memory for KV: the price of a GiB for an hour; GiB/s at which a hit comes to the GPU (infinite: it is there)."""

    name: str
    gib_hour: float
    gib_hour_source: str
    load_gib_s: float
    load_source: str

    def compute_load_ms(self, byte_count: float) -> float:
        """The time that it takes to bring KV from this tier to the GPU, in ms.

        >>> MemoryTier("ssd", 0.0, "", 5.0, "").compute_load_ms(5 * 2**30)
        1000.0
        """
        return byte_count / 2**30 / self.load_gib_s * 1000


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """Prompt tokens a second that one GPU computes, and on how many GPUs the weights are spread."""

    tokens_per_s: float
    base_ms: float
    source: str
    gpus: int
    weights_gib: float

    @property
    def gpu_ms_per_token(self) -> float:
        """GPU time of a token: what it costs. However many GPUs share the work, their times add up to it."""
        return 1000 / self.tokens_per_s

    @property
    def ms_per_token(self) -> float:
        """Time that a user waits for a token, where all GPUs work on it and lose nothing by that."""
        return self.gpu_ms_per_token / self.gpus


@dataclass(frozen=True)
class PriceBook:
    """All prices and rates, checked. ``source`` names the file that replaced some of them; empty for none."""

    currency: str
    date: str
    gpus: Mapping[str, Gpu]
    tables: Mapping[str, Any]
    source: str = ""

    def find_gpu(self, name: str) -> Gpu:
        if name not in self.gpus:
            raise InputError(
                f"no price of the GPU {name!r}", hint="one of " + ", ".join(self.gpus) + ", or --prices FILE"
            )
        return self.gpus[name]

    def find_tier(self, name: str, gpu: str) -> MemoryTier:
        """The prices of one tier beside a GPU. A GiB of HBM costs its share of the GPU unless a file says otherwise."""
        if name not in TIERS:
            raise InputError(f"unknown memory {name!r}", hint="one of " + ", ".join(TIERS))
        table = self.tables["memory"].get(name, {})
        beside = self.find_gpu(gpu)
        price = table.get("gib_hour", beside.hour / beside.memory_gib if name == "hbm" else None)
        if price is None:
            raise InputError(f"no price of a GiB of {name}", hint=f"[memory.{name}] gib_hour = ... in --prices FILE")
        return MemoryTier(
            name, price, table.get("gib_hour_source", "given"),
            table.get("load_gib_s", math.inf), table.get("load_source", "given"),
        )  # fmt: skip

    def find_parameters(self, model: str) -> float:
        """Billions of parameters of a model."""
        found = self.tables["parameters_b"].get(model)
        if found is None:
            raise InputError(
                f"no number of parameters for {model!r}", hint=f'[parameters_b] "{model}" = ... in --prices FILE'
            )
        return float(found)

    def find_prefill(self, model: str, gpu: str) -> PrefillRate:
        """The prefill rate of a model on a GPU: measured where it was, else computed from FLOPs.

        >>> book = load_price_book()
        >>> eight, seventy = (book.find_prefill(f"llama-3.1-{size}b", "h200") for size in (8, 70))
        >>> round(seventy.gpu_ms_per_token / eight.gpu_ms_per_token, 1), eight.gpus, seventy.gpus
        (8.8, 1, 2)
        """
        chosen, billions = self.find_gpu(gpu), self.find_parameters(model)
        weights = billions * 1e9 * BYTES_PER_PARAMETER / 2**30
        gpus = 1
        while weights > WEIGHTS_SHARE * gpus * chosen.memory_gib:
            gpus *= 2
        known = self.tables["prefill"].get(gpu, {}).get(model)
        if known is not None:
            base, source = known.get("base_ms", self.tables["computed"]["base_ms"]), known.get("source", "given")
            return PrefillRate(float(known["tokens_per_s"]), base, source, gpus, weights)
        rule = self.tables["computed"]
        share = rule["small_share"] if billions <= rule["small_up_to_b"] else rule["share"]
        rate = chosen.peak_tflops * 1e12 * share / (2 * billions * 1e9)
        return PrefillRate(rate, rule["base_ms"], f"{rule['source']} ({share:.0%})", gpus, weights)


def load_price_book(path: str | os.PathLike[str] | None = None) -> PriceBook:
    """Read the package's prices, with those of ``path`` in their places."""
    tables = tomllib.loads((resources.files(__package__) / "prices.toml").read_text(encoding="utf-8"))
    if path is not None:
        tables = _replace(tables, _read_file(Path(path)), "")
    _check_numbers(tables, "")
    for gpu, models in tables["prefill"].items():
        for model, one in models.items():
            if "tokens_per_s" not in one:
                raise InputError(f'[prefill.{gpu}."{model}"] has no tokens_per_s', hint="tokens a second of one GPU")
    for name, one in tables["gpu"].items():
        for field in ("hour", "memory_gib", "peak_tflops"):
            if field not in one:
                raise InputError(f"[gpu.{name}] has no {field}", hint="hour, memory_gib and peak_tflops")
    gpus = {
        name: Gpu(
            name, one["hour"], one.get("hour_source", "given"), one["memory_gib"], one["peak_tflops"],
            one.get("peak_source", "given"),
        )
        for name, one in tables["gpu"].items()
    }  # fmt: skip
    return PriceBook(
        str(tables["currency"]), str(tables["date"]), MappingProxyType(gpus), MappingProxyType(tables),
        "" if path is None else str(path),
    )  # fmt: skip


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"can't read {path}: {error.strerror}", hint="check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not TOML: {error}", hint="src/semblend/prices/prices.toml is an example") from None


_OPEN = ("gpu", "parameters_b", "prefill", "memory.hbm", "memory.dram", "memory.ssd")
"""Tables in which a user may name what the package does not know."""


def _replace(known: dict[str, Any], given: dict[str, Any], where: str) -> dict[str, Any]:
    """The known tables with the given numbers. A number that is replaced loses its old source."""
    found = dict(known)
    for name, value in given.items():
        place = f"{where}.{name}".lstrip(".")
        if name not in known and not where.startswith(_OPEN):
            raise InputError(f"prices: {place} is unknown", hint="one of " + ", ".join(known))
        if isinstance(value, dict) != isinstance(known.get(name, value), dict):
            raise InputError(
                f"prices: {place} has the wrong form", hint="src/semblend/prices/prices.toml is an example"
            )
        if isinstance(value, dict):
            found[name] = _replace(known.get(name, {}), value, place)
            continue
        found[name] = value
        for source in (f"{name}_source", "source"):
            if source in known and source not in given and name != source:
                found[source] = "given"
    return found


def _check_numbers(table: Mapping[str, Any], where: str) -> None:
    """Prices are 0 or more; what is divided by is more than 0."""
    for name, value in table.items():
        place = f"{where}.{name}".lstrip(".")
        if isinstance(value, dict):
            _check_numbers(value, place)
        elif isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise InputError(f"prices: {place} is {value!r}", hint="a number or a text")
        elif not isinstance(value, str):
            is_price = name in ("hour", "gib_hour", "base_ms")
            if not math.isfinite(value) or value < 0 or (value == 0 and not is_price):
                raise InputError(f"prices: {place} is {value}", hint="0 or more" if is_price else "more than 0")
        elif where and not name.endswith("source"):
            raise InputError(f"prices: {place} is {value!r}", hint="a number")
