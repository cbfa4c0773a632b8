"""Who might hold the tokens of a prompt: the donor store, its index, and evidence of similarity.

A candidate is a hint; only ``align`` proves equality.
"""
