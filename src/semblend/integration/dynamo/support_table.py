"""What a Dynamo deployment may have, and what becomes of its requests. One table, for the docs."""

from __future__ import annotations

from semblend.integration.version_support import Feature, Served

_REAL = "tests/engines/dynamo/test_placement.py"
_DEATHS = "tests/engines/dynamo/test_deaths.py"
_SHARED = "tests/engines/dynamo/test_several_routers.py"
_FAKE = "tests/integration/dynamo/test_router.py"

FEATURES: tuple[Feature, ...] = (
    Feature("documents behind other beginnings", Served.YES, "pinned where they were computed", _REAL),
    Feature("equal beginnings", Served.YES, "Dynamo's index of KV events says which worker has them", _REAL),
    Feature("prompts that nobody has seen", Served.YES, "sent without a pin: Dynamo's KvRouter chooses", _REAL),
    Feature("a home with too much to do", Served.YES, "sent without a pin; load as Dynamo counts it", _REAL),
    Feature("a worker that dies", Served.YES, "before the first token: sent again, without a pin", _DEATHS),
    Feature("an answer that breaks off", Served.NO, "the error goes to the frontend, which may migrate it", _FAKE),
    Feature("cache salts, LoRA adapters", Served.YES, "a namespace each (mockers themselves ignore salts)", _REAL),
    Feature("data-parallel ranks", Served.YES, "each rank counts as a worker; shown with a fake", _FAKE),
    Feature("routing constraints, priorities", Served.PER_REQUEST, "a request with some is Dynamo's alone", _FAKE),
    Feature("images, audio, embeddings", Served.PER_REQUEST, "equal token ids do not mean equal prompts there", _FAKE),
    Feature("prefill and decode apart", Served.PER_REQUEST, "what was prefilled elsewhere is not moved", _FAKE),
    Feature("several of our routers", Served.YES, "what one places, the others know, through a Redis", _SHARED),
)
