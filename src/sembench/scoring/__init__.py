"""How good an answer is, and how sure a rate is: scores, intervals, pairs, comparison of two results.

Nothing here knows where a record came from.
"""
