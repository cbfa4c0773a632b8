"""Scores of answers, rates with intervals, pairs, and the comparison of two results.

Nothing here talks to a server.
"""
