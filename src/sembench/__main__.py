"""``python -m sembench``."""

import sys

from sembench.cli import main

if __name__ == "__main__":
    sys.exit(main())
