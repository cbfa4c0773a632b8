"""One module a command of ``semantickv``: ``add`` declares its flags, ``run`` does it and returns the exit code.

Commands read arguments and write files; what they compute lives in the other folders.
"""
