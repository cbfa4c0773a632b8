"""Non-prefix KV reuse inside stock vLLM, through its KV connector V1 interface.

    connector_v1     what vLLM loads: a facade, one hook a line
    scheduler_half   lookup, claims, which request is where, receipts          (no vLLM import)
    worker_half      capture, splice, passes of the stock model, fallbacks     (no vLLM import)
    hash_chain       keeps approximate KV out of vLLM's exact prefix cache     (no vLLM import)
    model_access     the stock model and its cache, as our blender wants them
    orders           what the scheduler half tells the worker half, and back
    receipts         from a report of the worker to a receipt
    metrics          our Prometheus metrics on vLLM's own endpoint
    settings         SEMBLEND_* settings, also from kv_connector_extra_config
    versions         which vLLM versions are known, and how well
    contract         the names in vLLM that we lean on, checked at start and against other versions' sources
    cache_layout     where a backend really keeps a token's key and value
    start            what the engine is, and whether we can work in it

Load it with ``--kv-transfer-config '{"kv_connector":"SemBlendConnectorV1",
"kv_connector_module_path":"semblend.integration.vllm.connector_v1","kv_role":"kv_both"}'`` and nothing else.
"""
