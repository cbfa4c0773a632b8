"""Recorded traffic: the collecting proxy, readers of trace files, typed blocks, and the arrays of the simulator.

Nothing here decides what a cache keeps.
"""
