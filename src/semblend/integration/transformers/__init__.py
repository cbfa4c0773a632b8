"""Non-prefix KV reuse in a script that calls ``model.generate()`` of transformers, without an engine of ours.

reuse           `TransformersReuse`: prepares a cache for a prompt, keeps finished ones as donors, writes receipts
model_access    the user's own model over rows of one prompt, as our blender wants it
refusals        why a model, or a call of generate(), is not served
"""
