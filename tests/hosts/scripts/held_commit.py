"""The example training, whose commits follow the plan of a test: see `staged_writer`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[3] / "examples" / "hosts"))

import pytest
import train

from async_checkpoint.staged_writer import PLAN, Plan

if __name__ == "__main__":
    Plan(Path(os.environ[PLAN])).use(pytest.MonkeyPatch())
    train.main()
