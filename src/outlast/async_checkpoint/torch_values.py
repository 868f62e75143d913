"""Reads what `torch.save` has written."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch


def read(data: bytes, *, weights_only: bool = True, map_location: str | None = "cpu") -> Any:
    """The value in `data`."""
    with warnings.catch_warnings():
        # Since torch 2.15: that it checks the indices of each sparse tensor, which it has to. Where
        # warnings are errors, the value would not be loaded.
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
        return torch.load(io.BytesIO(data), map_location=map_location, weights_only=weights_only)
