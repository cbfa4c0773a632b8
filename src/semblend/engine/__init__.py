"""The embedded engine: a small, readable server of Llama- and Qwen-shaped models over a paged KV pool.

It exists so that semantic reuse can be run, measured and taught on any machine, a CPU included. Needs
``pip install 'semblend-suite[local]'``; nothing below this package imports it.
"""
