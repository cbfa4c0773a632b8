"""From a plan to KV in the engine's cache: load donor KV, compute what is missing, repair, report.

It works on any engine that offers ``materialize.contract``; nothing here knows a concrete engine.
"""
