"""Non-prefix KV reuse in TensorRT-LLM's PyTorch backend, through its KV cache connector. Never run on the real engine.

    connector        what TensorRT-LLM loads: a scheduler class and a worker class
    halves           both halves, one hook a line, and how an engine is opened        (no TensorRT-LLM import)
    reuse_service    what the halves share: claims, copies, donors, receipts          (no TensorRT-LLM import)
    twin_model       the engine's own weights, computed by our model in slots of our own
    engine_support   versions, hooks that we lean on, settings, why an engine is not served
    salts            salts that keep approximate KV out of the engine's reuse tree
    launcher         `semblend-trtllm`

A claim is a promise here: TensorRT-LLM has no way to hear that a load failed. So all work is done before the claim, in
slots of our own, and what is left to do behind it is one copy.
"""
