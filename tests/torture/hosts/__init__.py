"""Histories of real processes on several hosts, under faults of hosts and of their network."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples" / "hosts"
sys.path.append(str(EXAMPLES))  # `network` and `host`, which a test has by its configuration
