"""Bytes: where KV lies, how a key moves to another position, and how donor KV gets into an engine's pool.

=================== ================================================================= ==============================
module              cares about                                                       in → out
=================== ================================================================= ==============================
``rope_config``     what a config says about rotation; why a model is refused         dict → frequencies, or a reason
``rope``            rotating and relocating keys                                      K at p → K at p + shift
``layout``          where slot s, head h of layer l lies in an engine's tensors       tensors → ``KvLayout``
``splice``          gather, rotate, scatter: donor KV into the pool                   ``Move`` list → bytes in place
``attention_plain`` attention of scattered rows, in plain torch                       q, positions → rows
``kernels``         the two above in Triton; imported only where a GPU runs them      the same
=================== ================================================================= ==============================

Every kernel has a plain twin with the same meaning; the twin is the specification.
"""
