"""Computing: weights, rows of a pass, the paged KV pool, attention, sampling, tokenizer.

Nothing here schedules, and nothing here knows about requests.
"""
