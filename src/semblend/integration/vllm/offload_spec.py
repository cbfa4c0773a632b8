"""Our eviction policies in the CPU offload of vLLM 0.26, which has a module path for the whole offload only.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
      {"spec_name": "SemBlendOffloadingSpec", "spec_module_path": "semblend.integration.vllm.offload_spec",
       "cpu_bytes_to_use": 17179869184, "eviction_policy": "Adaptive"}}'

The offload is vLLM's own; only what leaves first is ours. From vLLM 0.27 on name the policy itself: `offload_policy`.
"""

from __future__ import annotations

from vllm.v1.kv_offload.base import OffloadingManager
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from semblend.errors import ConfigError
from semblend.integration.vllm import offload_policy


class SemBlendOffloadingSpec(CPUOffloadingSpec):
    """vLLM's offload to the host's memory, with one of our policies by its class's name."""

    _manager: OffloadingManager | None
    eviction_policy: str

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            name, self.eviction_policy = self.eviction_policy, "lru"
            self._manager = replace_policy(super().get_manager(), name, getattr(self, "num_blocks", 0))
        return self._manager


def replace_policy(manager: OffloadingManager, name: str, capacity: int) -> OffloadingManager:
    """Give a manager that has stored nothing yet the policy of this name."""
    policy = getattr(offload_policy, name, None)
    if not (isinstance(policy, type) and issubclass(policy, offload_policy.Adaptive)):
        raise ConfigError(
            f"no eviction policy is called {name!r}", hint="Adaptive, Lfu, Slru or Lru2; see offload_policy"
        )
    is_known = isinstance(manager, CPUOffloadingManager) and isinstance(getattr(manager, "_policy", None), CachePolicy)
    if not is_known or not capacity:
        raise ConfigError(
            "this vLLM's offload is another one",
            hint=f'name the policy by its own path: "cache_policy_module_path": "{offload_policy.__name__}"',
        )
    manager._policy = policy(cache_capacity=capacity)
    return manager
