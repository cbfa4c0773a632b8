"""The semantic router as a component of a Dynamo deployment: registers a model, serves it, sends on to the workers.

Discovery, request plane and event plane are Dynamo's, and so are their ``DYN_*`` variables.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from semblend.errors import ConfigError
from semblend.integration.dynamo.placement import EvidenceProvider, WorkerKey, WorkerState
from semblend.integration.dynamo.requests import RoutedPrompt
from semblend.integration.dynamo.router import SemanticRouter
from semblend.integration.versions import DYNAMO

# -- Dynamo's own KvRouter as our router sees it: loads and exact prefixes, from KV events that Dynamo follows itself.


_TIERS = ("device_blocks", "host_pinned_extension_blocks", "disk_extension_blocks")
"""A beginning in device memory, and how far host memory and disk prolong it."""


class KvRouterWorkers:
    """Implements `DynamoWorkers` with a ``dynamo.llm.KvRouter``."""

    def __init__(self, kv_router: Any) -> None:
        self._kv_router = kv_router

    async def list_states(self, prompt: RoutedPrompt) -> Sequence[WorkerState]:
        # An empty prompt asks for the load alone; to ask with the tokens would hash them a second time.
        loads = await self._kv_router.get_potential_loads([])
        overlaps = await self._kv_router.get_overlap_scores(
            prompt.token_ids,
            lora_name=prompt.lora_name,
            include_shared=False,
            cache_namespace=prompt.cache_salt,
        )
        size = overlaps["block_size"]
        prefixes = {_read_key(row): size * sum(row[tier] or 0 for tier in _TIERS) for row in overlaps["workers"]}
        return [
            WorkerState(
                key=_read_key(row),
                running=row["active_requests"],
                waiting_tokens=row["potential_prefill_tokens"],
                prefix_tokens=min(len(prompt.token_ids), prefixes.get(_read_key(row), 0)),
            )
            for row in loads
        ]

    async def send(self, request: Mapping[str, Any]) -> AsyncIterator[Any]:
        chunks: AsyncIterator[Any] = await self._kv_router.generate_from_request(dict(request))
        return chunks


def _read_key(row: Mapping[str, Any]) -> WorkerKey:
    return WorkerKey(row["worker_id"], row["dp_rank"])


COMPONENT = "semblend_router"
log = logging.getLogger("semblend")


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """``endpoint`` is where the workers serve; ``model_path`` brings the tokenizer that the frontend uses for us.

    ``block_size`` must be that of the workers: Dynamo hashes prompts in such blocks.
    """

    model_name: str
    model_path: str
    endpoint: str = "dynamo.backend.generate"
    block_size: int = 16

    def __post_init__(self) -> None:
        if len(self.endpoint.split(".")) != 3:
            raise ConfigError(
                f"{self.endpoint!r} is no endpoint of Dynamo", hint="namespace.component.endpoint, with dots between"
            )
        if self.block_size < 1:
            raise ConfigError(f"no blocks of {self.block_size} tokens", hint="the block size of the workers")

    @property
    def component(self) -> str:
        """Where the router itself serves: in the workers' namespace, in Dynamo's sense of the word."""
        return f"{self.endpoint.split('.')[0]}.{COMPONENT}"


def read_version() -> str:
    """The installed Dynamo in one line; `MissingDependencyError` where there is none."""
    version = DYNAMO.require_installed()
    return f"Dynamo {version}: {DYNAMO.find(version).note}"


class Company(Protocol):
    """What runs beside the router, in its event loop: a link to other routers."""

    async def run(self) -> None:
        """Run until cancelled."""

    def describe(self) -> dict[str, Any]:
        """Counts for the operator."""


def run_router(options: RouterOptions, evidence: EvidenceProvider[Any], company: Company | None = None) -> None:
    """Serve until a signal ends it."""
    read_version()
    import uvloop
    from dynamo.runtime import dynamo_worker
    from dynamo.runtime.logging import configure_dynamo_logging

    configure_dynamo_logging()

    @dynamo_worker()  # type: ignore[untyped-decorator, unused-ignore]
    async def serve(runtime: Any) -> None:
        await serve_router(runtime, options, evidence, company)

    uvloop.run(serve())


async def serve_router(
    runtime: Any, options: RouterOptions, evidence: EvidenceProvider[Any], company: Company | None = None
) -> None:
    """Wait for a first worker, register the model, and serve it until the runtime ends."""
    from dynamo.llm import (
        KvRouter,
        KvRouterConfig,
        ModelInput,
        ModelRuntimeConfig,
        ModelType,
        WorkerType,
        register_model,
    )

    behind = runtime.endpoint(options.endpoint)
    client = await behind.client()
    await client.wait_for_instances()
    kv_router = KvRouter(endpoint=behind, block_size=options.block_size, kv_router_config=KvRouterConfig())
    router = SemanticRouter(KvRouterWorkers(kv_router), evidence)
    own = runtime.endpoint(f"{options.component}.generate")
    await register_model(
        model_input=ModelInput.Tokens,
        model_type=ModelType.Chat | ModelType.Completions,
        endpoint=own,
        model_path=options.model_path,
        model_name=options.model_name,
        runtime_config=ModelRuntimeConfig(),
        worker_type=WorkerType.Aggregated,
        ignore_weights=True,
    )
    log.info("%s serves %s over the workers at %s", options.component, options.model_name, options.endpoint)

    async def tell_status(_request: Any = None, _context: Any = None) -> AsyncIterator[dict[str, Any]]:
        yield router.describe() | ({"shared": company.describe()} if company is not None else {})

    beside = asyncio.ensure_future(company.run()) if company is not None else None
    try:
        await asyncio.gather(
            own.serve_endpoint(router.generate, graceful_shutdown=True),
            runtime.endpoint(f"{options.component}.status").serve_endpoint(tell_status),
        )
    finally:
        if beside is not None:
            beside.cancel()
