"""Recorded traffic: readers, typed blocks, and the arrays that the simulator replays.

Nothing here decides what a cache keeps.
"""
