"""What a cache lets go first: one small interface, `policy.EvictionPolicy`, and the policies behind it.

The simulator, our radix cache, the donor store and the plug-ins of SGLang and vLLM ask the same objects. Nothing here
knows a cache: a policy hears which blocks a request used and says what a block is worth.
"""
