"""The example training, whose hosts count as lost after two seconds without a heartbeat."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "examples" / "hosts"))

import train

from outlast import inprocess

train.train = inprocess.Wrapper(heartbeat_timeout=2.0, monitor_process_interval=0.2)(
    train.train.__wrapped__
)

if __name__ == "__main__":
    train.main()
