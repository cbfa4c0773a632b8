"""The commands of ``sembench``, one module each: ``add(subparsers)`` describes a command, ``run(args)`` runs it.

Commands read arguments and write files; what they compute lives in the other folders.
"""
