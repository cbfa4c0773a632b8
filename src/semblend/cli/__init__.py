"""The ``semblend`` command: how words become settings, how results are printed, how errors look.

Nothing here decides about reuse; a library module never imports from here, except that all three packages share
``commandline`` and ``output``.
"""
