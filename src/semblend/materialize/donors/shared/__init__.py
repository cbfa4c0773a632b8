"""The donor directory: one folder in which all engine processes of a machine publish donors and find the others'.

Bytes on their way between processes live here. Nothing here knows an engine, or decides whether a donor is used.
"""
