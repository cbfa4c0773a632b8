"""Evidence of reuse: responses, counters, audit streams and engine logs, held against each other.

Nothing here asks a server for an answer.
"""
