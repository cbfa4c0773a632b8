"""``python -m semblend``."""

import sys

from semblend.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
