"""Pages: the explorer, the files of the dashboard, and what reports are drawn with.

The routes that serve the dashboard live in ``engine/server``; nothing here computes KV.
"""
