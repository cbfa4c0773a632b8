"""Evidence of reuse: receipts, usage, counters, audit streams and engine logs, checked against each other.

Nothing here asks a server for an answer.
"""
