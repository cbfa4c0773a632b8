"""What a result must show before it may be called good.

A gate reads files only: the result, engine summaries and a noise calibration.
"""
