"""What engines say about their caches: KV events over ZMQ, and which passages of routed prompts stand in which block.

Everything here runs beside the requests. A routing decision reads a replica's memory and never waits for an engine.
"""
