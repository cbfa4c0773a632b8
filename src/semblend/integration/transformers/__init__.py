"""Non-prefix KV reuse in a script that calls ``model.generate()`` of transformers, without an engine of ours.

reuse           `TransformersReuse`: prepares a cache for a prompt, keeps finished ones as donors, writes receipts
reuse_cache     the `Cache` that generate() is handed
model_access    the user's own model over rows of one prompt, as our blender wants it
prefixes        which donor begins with the same tokens: KV that is exact without a check
refusals        why a model, or a call of generate(), is not served
versions        which versions of transformers are known, and how well
"""
