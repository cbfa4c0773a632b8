"""One module a command of ``sembench``: ``add(subparsers)`` describes it, ``run(args)`` does it.

Commands read arguments and write files; what they compute lives in the other folders.
"""
