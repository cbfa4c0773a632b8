"""What is computed from simulations: curves, bounds, latency, calibration, experiments, replays and advice.

Nothing here writes files; ``output`` does.
"""
