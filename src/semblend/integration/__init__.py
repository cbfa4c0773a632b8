"""Engines that are not ours: one package each, over one protocol (`semblend.integration.adapter`)."""
