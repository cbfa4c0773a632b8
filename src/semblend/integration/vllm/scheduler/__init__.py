"""Our side in vLLM's scheduler: lookup, claims, prefix-cache hashes, receipts.

It touches no KV and needs no GPU.
"""
