"""Who owns donor KV, in which memory tier, and for how long.

Nothing here decides whether a donor is used.
"""
