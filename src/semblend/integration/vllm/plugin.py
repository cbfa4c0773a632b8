"""The entry point ``vllm.general_plugins``: vLLM knows our connector by its name, without a module path.

vLLM calls `register` in every process that it starts, whether our connector is asked for or not. So nothing is imported
here but vLLM's own table of connectors, and a failure is a line in the log: an engine that does not use us must not
notice that we are installed.
"""

from __future__ import annotations

import logging

CONNECTOR = "SemBlendConnectorV1"
MODULE = "semblend.integration.vllm.connector_v1"

log = logging.getLogger("vllm.semblend")


def register() -> None:
    """Enter the connector into vLLM's table, where it is not there yet; its module is imported when it is asked for."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if CONNECTOR not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    except Exception as error:
        log.warning(
            "SemBlend is not registered in this vLLM: %s. Name it by its path: "
            '"kv_connector":"%s","kv_connector_module_path":"%s"',
            error,
            CONNECTOR,
            MODULE,
        )
