"""Which tokens of a prompt and its donors correspond, and which spans together save most prefill.

Every span is proven token by token here. Nothing here knows about costs, engines or KV.
"""
