"""Settings of the connector: every SEMBLEND_* setting, and a few that only an engine's worker has.

All of them may stand in ``kv_connector_extra_config``, under the name of the setting (``quality``) or of its variable
(``SEMBLEND_QUALITY``). They win over the environment, which wins over the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from semblend.config import GIB, SETTINGS, load_config, setting
from semblend.errors import ConfigError
from semblend.materialize.donors.places import AUTO
from semblend.session.settings import LocalSettings, list_own_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings(LocalSettings):
    """How the connector behaves; ``config`` holds what the library reads."""

    guide: ClassVar[str] = "docs/guides/vllm.md"

    donor_host_bytes: int = setting(
        AUTO, "Host memory for donor KV, per rank; by itself a quarter of what is free at the start, at most 16 GiB."
    )
    donor_device_bytes: int = setting(
        AUTO,
        "Accelerator memory for donor KV, per rank; 0 = none. By itself at most a half of what vLLM leaves free once "
        "it has warmed up, at most a twentieth of the device, none where 2 GiB would not stay free.",
    )
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
    latency_budget_ms: float = setting(
        0.0, "The work of preparing a request may take this long; then vLLM prefills it. 0 = no limit."
    )
    share_equal_prompts: bool = setting(
        True,
        "Requests with equal prompts share the blocks that were loaded for the first of them, and the next turns of a "
        "conversation go on from them.",
    )
    heal_prefixes: bool = setting(
        True,
        "A prefix is computed exactly once, and found by the next ones, where its loads and those of requests that "
        "wait cost as much.",
    )
    thresholds: str = setting("", "File of quality thresholds (`semblend calibrate`); empty = by the model's name.")
    receipts: bool = setting(True, "Put the receipt into kv_transfer_params of the response.")
    reset_drops_donors: bool = setting(
        True, "A reset of vLLM's prefix cache drops donors too; false is for measurements that empty it between runs."
    )
    admin_socket: str = setting(
        "", "A Unix socket at which `semblend vllm donors` lists, pins and forgets donors; empty = none."
    )

    def __post_init__(self) -> None:
        LocalSettings.__post_init__(self)
        if self.donor_bits not in (8, 16):
            raise ConfigError(f"donor_bits={self.donor_bits!r} is not 8 or 16", hint=f"see {self.guide}")
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
    own = list_own_settings(ConnectorSettings)
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
