"""The commands of ``sembench``: ``add`` declares those of a module, a function a command does the work.

Commands read arguments and write files; what they compute lives in the other folders.
"""
