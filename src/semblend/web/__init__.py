"""Pages: the explorer, the files of the dashboard and of the fleet page, and what reports are drawn with.

The routes that serve the dashboard live in ``engine/server``; nothing here computes KV.
"""
