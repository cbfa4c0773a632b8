"""The cache simulator: prefix and block semantics, compiled loops and their plain twins.

A policy is a priority function; nothing here reads files or draws pictures.
"""
