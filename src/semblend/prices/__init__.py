"""What memory, GPUs and prefill cost: data that a user can replace. Every number says where it comes from.

The numbers are in ``prices.toml``; this package only reads them.
"""

from semblend.prices.price_book import Gpu, MemoryTier, PrefillRate, PriceBook, load_price_book

__all__ = ["Gpu", "MemoryTier", "PrefillRate", "PriceBook", "load_price_book"]
