"""Pages and what they are drawn with: the live pages as files, reports, tables, charts. One palette serves them all.

Nothing here computes or serves: servers and reports above take from here, and it imports nothing of ours but errors.
"""
