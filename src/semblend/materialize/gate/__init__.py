"""How far an answer would be from a cold one: observers of a pass, risk, thresholds and their calibration.

Nothing here writes KV.
"""
