"""A `Job` in the process of the test, with a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import outlast


def job(path: Path, **options: Any) -> outlast.Job:
    """A job that saves only at its end and handles no signals, unless the options say otherwise."""
    model = nn.Linear(1, 1)
    given = {"every": None, "signals": (), **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return outlast.Job(path, model=model, optimizer=optimizer, **given)
