"""Non-prefix KV reuse inside stock SGLang, through its table of radix caches, and the SemanticPrefixProvider interface.

plugin           what SGLang loads in each of its processes: registers the backend ``semblend``
start            what the engine is, whether we can work in it or why not, and its cache
radix_backend    the cache that SGLang's scheduler gets: a facade, one hook a line
sessions             what the cache decides about requests and donors                          (no SGLang import)
model_access     the stock model and its KV pool, as our blender wants them
hicache          a storage backend for SGLang's own exact pages
settings         SEMBLEND_* settings, and those that only an engine has
"""
