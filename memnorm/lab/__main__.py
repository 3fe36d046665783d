"""`python -m memnorm.lab` is the command `memnorm`."""

import sys

from memnorm.lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
