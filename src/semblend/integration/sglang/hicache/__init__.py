"""HiCache's third level: SGLang's exact pages in a folder, so that they outlive evictions and restarts.

page_storage     the storage backend that SGLang makes and asks: `SemBlendPages`
"""
