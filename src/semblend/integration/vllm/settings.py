"""Settings of the connector: every SEMBLEND_* setting, and a few that only an engine's worker has.

All of them may stand in ``kv_connector_extra_config``, under the name of the setting (``quality``) or of its variable
(``SEMBLEND_QUALITY``). They win over the environment, which wins over the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from semblend.config import GIB, SETTINGS, SemBlendConfig, load_config, setting
from semblend.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """How the connector behaves; ``config`` holds what the library reads."""

    config: SemBlendConfig = field(default_factory=SemBlendConfig)
    donor_host_bytes: int = setting(4 * GIB, "Host memory for donor KV, per rank.")
    donor_device_bytes: int = setting(0, "Accelerator memory for donor KV, per rank; 0 = host only.")
    donor_bits: int = setting(
        16, "Bits of a number of donor KV outside the accelerator: 16, or 8 for half the memory and a small error."
    )
    donor_disk_path: str = setting("", "Folder for donor KV that falls out of host memory; empty = none.")
    donor_disk_bytes: int = setting(8 * GIB, "Limit of `donor_disk_path`, per rank.")
    donor_directory: str = setting(
        "",
        "Folder in which engines of one machine and user publish donors for each other, such as "
        "`/dev/shm/semblend-donors`; empty = none.",
    )
    donor_directory_bytes: int = setting(4 * GIB, "What this engine may keep in `donor_directory`, all ranks in sum.")
    donor_min_new_tokens: int = setting(
        32, "A prompt of which fewer tokens were computed (the rest was an exact hit) is not kept as a donor."
    )
    latency_budget_ms: float = setting(
        0.0, "The work of preparing a request may take this long; then vLLM prefills it. 0 = no limit."
    )
    step_work_ms: float = setting(
        40.0, "While other requests run, a step works so long on loads and repairs of those that wait for them."
    )
    share_equal_prompts: bool = setting(
        True, "Requests with equal prompts share the blocks that were loaded for the first of them."
    )
    heal_prefixes: bool = setting(
        True, "A prefix whose loads have together cost a prefill is computed exactly once, and found by the next ones."
    )
    thresholds: str = setting("", "File of quality thresholds (`semblend calibrate`); empty = by the model's name.")
    receipts: bool = setting(True, "Put the receipt into kv_transfer_params of the response.")
    reset_drops_donors: bool = setting(
        True, "A reset of vLLM's prefix cache drops donors too; false is for measurements that empty it between runs."
    )
    require_cache_salt: bool = setting(
        False, "A request without a cache_salt neither reuses nor becomes a donor: nobody shares by accident."
    )
    admin_socket: str = setting(
        "", "A Unix socket at which `semblend vllm donors` lists, pins and forgets donors; empty = none."
    )

    def __post_init__(self) -> None:
        for name in (
            "donor_host_bytes",
            "donor_device_bytes",
            "donor_disk_bytes",
            "donor_directory_bytes",
            "donor_min_new_tokens",
            "latency_budget_ms",
            "step_work_ms",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                raise ConfigError(f"{name}={value!r} is not a number of 0 or more", hint="see docs/guides/vllm.md")
        for name, kind in (
            ("receipts", bool),
            ("require_cache_salt", bool),
            ("reset_drops_donors", bool),
            ("share_equal_prompts", bool),
            ("heal_prefixes", bool),
            ("thresholds", str),
            ("donor_disk_path", str),
            ("donor_directory", str),
            ("admin_socket", str),
        ):
            if not isinstance(getattr(self, name), kind):
                wanted = "true or false" if kind is bool else "a path"
                raise ConfigError(f"{name}={getattr(self, name)!r} is not {wanted}", hint="see docs/guides/vllm.md")
        if not self.step_work_ms:
            raise ConfigError("step_work_ms=0 leaves loads no time", hint="40 is the default")
        if self.donor_bits not in (8, 16):
            raise ConfigError(f"donor_bits={self.donor_bits!r} is not 8 or 16", hint="see docs/guides/vllm.md")
        if not self.config.strict_prefix_boundary:
            raise ConfigError(
                "strict_prefix_boundary=0 hands spans to the engine, and vLLM's connectors can claim one prefix only",
                hint="leave SEMBLEND_STRICT_PREFIX_BOUNDARY at 1; the embedded engine takes 0",
            )


def connector_settings(extra: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> ConnectorSettings:
    """The settings from ``kv_connector_extra_config`` over environment and file.

    >>> connector_settings({"SEMBLEND_QUALITY": "fast", "min_span_tokens": 64}, {}).config.quality
    'fast'
    """
    variables = {setting.variable: setting for setting in SETTINGS}
    names = {setting.name for setting in SETTINGS}
    own = {f.name for f in fields(ConnectorSettings)} - {"config"}
    library: dict[str, Any] = {}
    connector: dict[str, Any] = {}
    for key, value in extra.items():
        name = variables[key].name if key in variables else key
        if name in names:
            library[name] = _parse(name, value)
        elif name in own:
            connector[name] = value
        else:
            raise ConfigError(f"unknown setting {key!r} in kv_connector_extra_config", hint="see docs/guides/vllm.md")
    return ConnectorSettings(config=load_config(environ, **library), **connector)


def _parse(name: str, value: Any) -> Any:
    """A string as a variable would hold it becomes the setting's type; JSON's own types stay."""
    if not isinstance(value, str):
        return value
    variable = next(setting.variable for setting in SETTINGS if setting.name == name)
    return getattr(load_config({variable: value}), name)
