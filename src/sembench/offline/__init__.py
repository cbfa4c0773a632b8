"""Replay without a server: what an exact cache would hold, what a planner proposes, how much of that is right.

Nothing here talks to a server, so nothing here measures time to first token.
"""
