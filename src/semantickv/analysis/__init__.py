"""What follows from simulations: curves, bounds, latency, calibration, experiments, advice.

Nothing here writes files; ``output`` does.
"""
