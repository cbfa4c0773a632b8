"""What a result must show before it may be called good.

A gate reads a result file and nothing else.
"""
