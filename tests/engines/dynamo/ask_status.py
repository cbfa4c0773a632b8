"""Joins a deployment and prints what our routers tell an operator, a line of JSON each: ``python ask_status.py``."""

from __future__ import annotations

import asyncio
import json
from typing import Any


def main() -> None:
    import uvloop
    from dynamo.runtime import dynamo_worker

    @dynamo_worker()
    async def ask(runtime: Any) -> None:
        client = await runtime.endpoint("dynamo.semblend_router.status").client()
        await asyncio.wait_for(client.wait_for_instances(), 30)
        for instance in client.instance_ids():
            async for answer in await client.direct({}, instance):
                data = answer.data() if callable(getattr(answer, "data", None)) else answer
                print(json.dumps(data), flush=True)
        runtime.shutdown()

    uvloop.run(ask())


if __name__ == "__main__":
    main()
