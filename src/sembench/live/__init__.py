"""Replay against a real server: the live loop, load, the judge, and the log that lets a run resume.

What the server says about itself is weighed in ``witnesses``, not here.
"""
