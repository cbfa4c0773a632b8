"""Is it worth it: cost, layers, selection, and a decision that carries its reason."""
