"""The example training, whose ranks restart after some seconds without progress."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "examples" / "hosts"))

import train

from outlast import inprocess

train.train = inprocess.Wrapper(
    soft_timeout=timedelta(seconds=8), hard_timeout=timedelta(seconds=16)
)(train.train.__wrapped__)

if __name__ == "__main__":
    train.main()
