"""Reasons not to believe a result: what is wrong with the file, with the evidence beside it, and with what it shows.

Gates and the report read the same findings. Nothing here talks to a server.
"""
