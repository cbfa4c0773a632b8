"""Replay without a server: what an exact cache would hold, what a planner proposes, and how much of that holds.

Nothing here measures time to first token.
"""
