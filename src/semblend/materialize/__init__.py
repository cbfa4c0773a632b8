"""Bytes: where KV lies, how a key moves to another position, and how donor KV gets into an engine's pool.

============ ============================================================================ ===========================
module       cares about                                                                  in → out
============ ============================================================================ ===========================
``contract`` what an engine must offer: a layout, a model that runs rows, observers' calls
``kv``       where a slot lies, rotating and relocating keys, splice and its kernels      ``Move`` list → bytes in place
``donors``   who owns donor KV, in which tier, and what neighbours have published         slots → ``DonorTensors``
``gate``     what passes show, and how far an answer would be from a cold one             features → nats
``blend``    from a plan to a prompt that is ready to be answered                         plan → ``Blended``
============ ============================================================================ ===========================

Every kernel has a plain twin with the same meaning; the twin is the specification.
"""
