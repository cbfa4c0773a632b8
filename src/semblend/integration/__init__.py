"""Engines that are not ours, one package each, over one contract (`semblend.materialize.contract`).

An adapter translates; what would be the same in another engine belongs below.
"""
