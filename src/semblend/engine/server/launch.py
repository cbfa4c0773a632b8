"""A model's name in, a running engine out: what `semblend serve` starts."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from semblend.config import SemBlendConfig
from semblend.confirm import events
from semblend.discover.journal import set_aside
from semblend.engine.core.assemble import assemble
from semblend.engine.core.directory_donors import open_directory
from semblend.engine.core.engine import Engine
from semblend.engine.core.stops import Detokenizer
from semblend.engine.core.threads import prepare_cpu
from semblend.engine.model.model import DecoderModel, PooledModel
from semblend.engine.model.tokenizer import ModelTokenizer
from semblend.engine.model.weights import read_name
from semblend.engine.server.config import ServeConfig
from semblend.engine.server.local_engine import LocalEngine
from semblend.errors import ConfigError, InputError, StoreError
from semblend.facade import SemBlend
from semblend.materialize.blend.passes import MANY_ROWS, time_passes
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.thresholds import ChosenTable, TableSource, Thresholds, choose_table
from semblend.models import resolve
from semblend.plan.times import Timed

log = logging.getLogger("semblend.server")


def open_library(config: SemBlendConfig) -> SemBlend:
    """Open the library; a store that cannot be used costs its donors, not the start.

    A damaged store, or one of a newer version, is set aside under another name. One that others use, or that is no
    donor store at all, is left alone, and donors are kept in memory only.
    """
    try:
        return SemBlend(config)
    except StoreError as error:
        if not config.store:
            raise
        aside = set_aside(Path(config.store).expanduser()) if error.problem is not None else None
        if aside is None:
            library = SemBlend(replace(config, store=""))
            done = "it is left alone, and donors are kept in memory only"
        else:
            library = SemBlend(config)
            done = f"it was set aside as {aside.name}, and a new store is begun"
        log.warning("%s; %s (hint: %s)", error.message, done, error.hint)
        library.events.emit(events.error("store", f"{error.message}; {done}"))
        return library


@dataclass(frozen=True, slots=True)
class Launch:
    """Loads what a `ServeConfig` names and puts the engine together."""

    config: ServeConfig

    def __post_init__(self) -> None:
        if self.config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("there is no CUDA device here", hint="leave the device out, or say cpu")

    @property
    def chosen_device(self) -> str:
        return self.config.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def path(self) -> Path:
        return resolve(self.config.model)

    @property
    def gate(self) -> ChosenTable:
        """Where the quality gate opens for this model, known by its file's name or by the name inside."""
        config = self.config
        found = choose_table(config.model, file=config.thresholds)
        if found.source is not TableSource.DEFAULT:
            return found
        try:
            path = self.path
        except InputError:  # a model that was handed over ready, under a name of its own
            return found
        return choose_table(config.model, read_name(path)) if path.suffix == ".gguf" else found

    def load(self) -> tuple[DecoderModel, ModelTokenizer]:
        """The model and its tokenizer."""
        path = self.path
        prepare_cpu(self.config.threads)
        dtype = getattr(torch, self.config.dtype) if self.config.dtype else None
        return DecoderModel.load(path, self.chosen_device, dtype), ModelTokenizer.load(path)

    def engine(self, library: SemBlendConfig) -> LocalEngine:
        """Loads the model and puts everything together; `start` it."""
        gate = self.gate  # a file that cannot be read is told before the model is loaded
        model, tokenizer = self.load()
        if not tokenizer.prepare():
            log.warning(
                "texts with control tokens of %s are refused: they look like its template's own", self.path.name
            )
        return LocalEngine(self.assemble(model, tokenizer, library, gate.thresholds), tokenizer, gate=gate)

    def assemble(
        self, model: DecoderModel, tokenizer: Detokenizer, library: SemBlendConfig, gate: Thresholds | None = None
    ) -> Engine:
        """An engine around a loaded model, with the library and the model warmed up."""
        semblend = open_library(library)
        try:
            semblend.warm_up()
            model.warm_up()
            return self._assemble(model, tokenizer, semblend, gate or self.gate.thresholds)
        except BaseException:
            semblend.close()
            raise

    def _assemble(self, model: DecoderModel, tokenizer: Detokenizer, semblend: SemBlend, gate: Thresholds) -> Engine:
        config, library = self.config, semblend.config
        shared = (
            open_directory(config.donor_directory, model, bits=config.donor_bits) if config.donor_directory else None
        )
        engine = assemble(
            model,
            pool_tokens=config.pool_tokens,
            config=config.engine_config(quality=library.quality),
            semblend=semblend,
            quality=QualitySettings.of_config(library, gate),
            donor_device_bytes=config.donor_device_bytes,
            donor_host_bytes=config.donor_host_bytes,
            donor_disk_bytes=config.donor_disk_bytes if config.donor_dir else 0,
            donor_dir=config.donor_dir or None,
            donor_bits=config.donor_bits,
            directory=shared,
            detokenizer=tokenizer,
        )
        engine.reuse.sessions.note_start(_time_passes(model) or ())
        if shared is not None:
            engine.reuse.share_donors(shared, config.donor_directory, config.donor_directory_bytes)
        return engine


def _time_passes(model: DecoderModel) -> tuple[Timed, Timed] | None:
    """How long passes of this model take on this machine; computes 320 rows on a CPU."""
    many = MANY_ROWS.get(model.device.type, MANY_ROWS["cpu"])
    pool = model.new_pool(2 * many)
    slots = pool.slots_of(pool.allocate(pool.blocks_for(many)), 0, many)
    return time_passes(PooledModel(model, pool), slots)
