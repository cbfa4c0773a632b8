"""Made-up traffic with a known shape, and when it arrives.

Everything is drawn from a seed; nothing here is measured.
"""
