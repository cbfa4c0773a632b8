"""Non-prefix KV reuse inside stock vLLM, through its KV connector V1 interface.

    connector_v1     what vLLM loads: one hook a line, and none raises
    scheduler/       a session for each request, its blocks and hashes, donors that workers hold   (no vLLM import)
    worker/          capture, splice, passes of the stock model, fallbacks
    orders           what the scheduler's side tells the worker's side each step, and back
    startup_checks   what the engine is, and whether we can work in it; `refusals` says why not
    source_check     the names in vLLM that we lean on, checked at start and against other versions' sources
    metrics          our Prometheus metrics on vLLM's own endpoint
    settings         SEMBLEND_* settings, also from kv_connector_extra_config

Load it with ``--kv-transfer-config '{"kv_connector":"SemBlendConnectorV1",
"kv_connector_module_path":"semblend.integration.vllm.connector_v1","kv_role":"kv_both"}'`` and nothing else.
"""
