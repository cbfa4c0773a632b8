"""One module a command, each with ``add(subparsers)`` and ``run(args) -> int``."""
