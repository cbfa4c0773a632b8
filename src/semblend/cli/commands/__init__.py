"""The commands of ``semblend``: ``add`` declares those of a module, a function a command does the work.

Importing a command must stay cheap (``semblend --help`` imports them all), so each loads what it needs when it runs.
"""
