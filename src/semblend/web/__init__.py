"""Pages: the explorer and the files of the dashboard.

The routes that serve the dashboard live in ``engine/server``; nothing here computes KV.
"""
