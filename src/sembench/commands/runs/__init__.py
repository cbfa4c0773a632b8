"""Commands that replay a manifest, offline or against a server.

None of them judges the result.
"""
