"""Our side in vLLM's worker: it copies donor KV out of vLLM's cache and brings it back.

It decides nothing about requests: it carries out the orders of the scheduler ours.
"""
