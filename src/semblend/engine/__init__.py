"""The embedded engine: a small, readable server of Llama- and Qwen-shaped models over a paged KV pool.

``core`` schedules and keeps the KV, ``model`` computes, ``server`` speaks HTTP. Only ``server`` knows about the wire.
"""
