"""``python -m semantickv``."""

import sys

from semantickv.cli import main

if __name__ == "__main__":
    sys.exit(main())
