"""`python -m moe_ext`: the command line."""

from __future__ import annotations

import sys

from moe_ext.cli import main

if __name__ == "__main__":
    sys.exit(main())
