"""python -m d2f COMMAND, the same as d2f COMMAND."""

import sys

from d2f.command import main

if __name__ == "__main__":
    sys.exit(main())
