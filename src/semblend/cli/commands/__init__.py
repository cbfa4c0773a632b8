"""One module a command of ``semblend``: ``add_arguments`` describes it, ``run`` does it and returns the exit code.

Importing a command must stay cheap (``semblend --help`` imports them all), so each loads what it needs in ``run``.
"""
