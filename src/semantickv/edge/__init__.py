"""Carries a client's request to an engine and the engine's answer back, byte for byte: connections, limits, faults.

Nothing here knows why an engine was chosen or what a prompt says.
"""
