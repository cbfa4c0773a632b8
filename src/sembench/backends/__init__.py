"""The servers that a live run can speak to, and the HTTP client they share.

A backend translates; it counts nothing and decides nothing.
"""
