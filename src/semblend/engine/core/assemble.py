"""An engine with all its parts, from a model: the one place that knows how they fit together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from semblend.config import SemBlendConfig
from semblend.discover.donor import Eviction
from semblend.engine.core.config import EngineConfig
from semblend.engine.core.engine import Engine
from semblend.engine.core.stops import Detokenizer
from semblend.engine.model.model import DecoderModel, PooledModel
from semblend.facade import SemBlend
from semblend.materialize.blend.blender import Blender
from semblend.materialize.blend.quality import CPU_PIECE_ROWS, MIN_PIECE_ROWS, Pace, QualitySettings
from semblend.materialize.donors.directory_kv import DirectoryKv
from semblend.materialize.donors.tiers import DonorKv
from semblend.materialize.gate.gate import OutcomeMemory
from semblend.materialize.gate.observers import find_tolerance
from semblend.reporting import report_disk_failure, report_policy_failure

GIB = 1 << 30


def assemble(
    model: DecoderModel,
    *,
    pool_tokens: int,
    config: EngineConfig | None = None,
    semblend: SemBlend | None = None,
    quality: QualitySettings | None = None,
    donor_device_bytes: int = 0,
    donor_host_bytes: int = GIB,
    donor_disk_bytes: int = 0,
    donor_dir: str | Path | None = None,
    donor_bits: int = 16,
    directory: DirectoryKv | None = None,
    detokenizer: Detokenizer | None = None,
) -> Engine:
    """Pool, donors, blender and engine for a model.

    A donor and its KV go together: whichever side lets go first, the other follows. Without a byte for donors the
    engine keeps none of its own; those of the directory still serve.
    """
    config = config or EngineConfig()
    library = semblend or SemBlend(SemBlendConfig())
    pool = model.new_pool(pool_tokens)

    def on_kv_evicted(donor_id: str, generation: int, reason: str) -> None:
        del generation, reason
        library.forget(donor_id, reason="engine")

    donor_kv = DonorKv(
        donor_device_bytes,
        donor_host_bytes,
        donor_dir,
        budget_disk_bytes=donor_disk_bytes,
        on_evicted=on_kv_evicted,
        rope=model.spec.rope,
        bits=donor_bits,
        directory=directory,
        eviction=library.config.eviction,
        on_policy_failure=partial(report_policy_failure, library.events),
        on_disk_failure=partial(report_disk_failure, library.events),
    )

    def on_forgotten(eviction: Eviction) -> None:
        if eviction.reason != "engine":  # that one came from us
            donor_kv.drop(eviction.donor.donor_id)

    library.on_evicted(on_forgotten)
    config = replace(config, keep_donors=config.keep_donors and donor_kv.has_room_for(model.device))
    quality = quality or QualitySettings(mode=config.quality)
    if donor_bits == 8 and quality.canary_tolerance is None:
        quality = replace(quality, canary_tolerance=find_tolerance(model.dtype, donor_bits))
    pace = Pace(config.step_work_ms)  # this engine's prompts are filled in pieces: others run meanwhile
    rows = CPU_PIECE_ROWS if model.device.type == "cpu" else MIN_PIECE_ROWS
    quality = replace(quality, piece_ms=config.step_work_ms, piece_rows=rows)
    blender = Blender(PooledModel(model, pool), donor_kv, quality, pace)
    outcomes = OutcomeMemory(blender.settings.thresholds)
    return Engine(model, pool, library, blender, config, detokenizer=detokenizer, outcomes=outcomes, pace=pace)
