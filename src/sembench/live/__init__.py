"""Replay against a real server: clients, the live loop, load, and the log that lets a run resume.

What the server says about itself is weighed in ``witnesses``, not here.
"""
