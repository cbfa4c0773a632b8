"""HiCache's third level: SGLang's exact pages in a folder, so that they outlive evictions and restarts.

page_storage     the storage backend that SGLang makes and asks: `SemBlendPages`
page_options     where pages are kept, and how many
live_model       the engine's model, which SGLang does not tell a storage backend
"""
