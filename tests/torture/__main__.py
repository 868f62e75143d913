"""Crash states, failing calls, histories of hosts, generated programs and states, until the time is
over, and a table.

python -m torture --seconds 3600 --seed 0
python -m torture --only crash:checkpointer --seed 17 --once
"""

from __future__ import annotations

import sys

from .runner import main

if __name__ == "__main__":
    sys.exit(main())
