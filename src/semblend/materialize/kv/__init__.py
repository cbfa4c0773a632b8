"""Bytes of KV: where they lie (layout), how a key moves to another position (rope), and the kernels that move them.

Every kernel has a plain twin with the same meaning. Nothing here knows about requests, donors' lifetimes or quality.
"""
