"""Where a request goes: what a prompt looks like, which replica has seen it, how loaded each one is.

Nothing here moves bytes; `edge` does.
"""
