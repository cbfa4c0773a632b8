"""A model's name in, a running engine out: what `semblend serve` starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from semblend.config import SemBlendConfig
from semblend.engine.core.assemble import assemble
from semblend.engine.core.config import EngineConfig
from semblend.engine.core.engine import Engine
from semblend.engine.core.stops import Detokenizer
from semblend.engine.model.model import Model
from semblend.engine.model.tokenizer import ModelTokenizer
from semblend.engine.server.serving_adapter import LocalEngine
from semblend.errors import ConfigError
from semblend.facade import SemBlend
from semblend.materialize.blend.quality import QualitySettings
from semblend.materialize.gate.thresholds import Thresholds, thresholds_for
from semblend.models import resolve

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GIB = 1 << 30


def threads_in_use() -> int:
    """Threads that the CPU computes with."""
    return torch.get_num_threads()


def torch_version() -> str:
    return str(torch.__version__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to load and how much room to give it. Empty ``device`` and ``dtype``: the best this machine has.

    ``thresholds`` names a file of `semblend calibrate`; empty takes what is known of the model. ``threads`` of the CPU
    compute; 0 leaves it to torch.
    """

    model: str
    device: str = ""
    dtype: str = ""
    pool_tokens: int = 32_768
    donor_device_bytes: int = 0
    donor_host_bytes: int = 2 * GIB
    donor_disk_bytes: int = 8 * GIB
    donor_dir: str = ""
    step_tokens: int = 512
    max_running: int = 32
    max_waiting: int = 256
    thresholds: str = ""
    threads: int = 0

    def __post_init__(self) -> None:
        if self.dtype and self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype!r} is unknown", hint="one of " + ", ".join(DTYPES))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("there is no CUDA device here", hint="leave the device out, or say cpu")
        if self.threads < 0:
            raise ConfigError(f"{self.threads} threads cannot compute", hint="1 or more; 0 leaves it to torch")

    @property
    def chosen_device(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def path(self) -> Path:
        return resolve(self.model)

    @property
    def gate(self) -> Thresholds:
        """Where the quality gate opens for this model."""
        return Thresholds.read(self.thresholds) if self.thresholds else thresholds_for(self.model)

    def load(self) -> tuple[Model, ModelTokenizer]:
        """The model and its tokenizer."""
        path = self.path
        if self.threads:
            torch.set_num_threads(self.threads)
        return Model.load(path, self.chosen_device, DTYPES.get(self.dtype)), ModelTokenizer.load(path)

    def engine(self, config: SemBlendConfig) -> LocalEngine:
        """Loads the model and puts everything together; `start` it."""
        gate = self.gate  # a file that cannot be read is told before the model is loaded
        model, tokenizer = self.load()
        return LocalEngine(self.assemble(model, tokenizer, config, gate), tokenizer)

    def assemble(
        self, model: Model, tokenizer: Detokenizer, config: SemBlendConfig, gate: Thresholds | None = None
    ) -> Engine:
        """An engine around a loaded model, with the library warmed up."""
        library = SemBlend(config)
        library.warm_up()
        return assemble(
            model,
            pool_tokens=self.pool_tokens,
            config=EngineConfig(
                model_name=self.model,
                quality=config.quality,
                step_tokens=self.step_tokens,
                max_running=self.max_running,
                max_waiting=self.max_waiting,
            ),
            semblend=library,
            quality=QualitySettings(mode=config.quality, thresholds=gate or self.gate, layer_share=config.layer_share),
            donor_device_bytes=self.donor_device_bytes,
            donor_host_bytes=self.donor_host_bytes,
            donor_disk_bytes=self.donor_disk_bytes if self.donor_dir else 0,
            donor_dir=self.donor_dir or None,
            detokenizer=tokenizer,
        )
