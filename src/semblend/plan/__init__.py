"""Is reuse worth it: costs, selection of tokens to recompute, and a decision that carries its reason.

Nothing here touches KV.
"""
