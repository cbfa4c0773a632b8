"""Files and pictures of simulated results.

Nothing here computes a figure that it does not show.
"""
