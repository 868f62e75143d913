"""A `TrainerCallback` that pings, so that a rank that hangs is detected by its missing steps."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from outlast.inprocess import CallWrapper


class PingCallback(TrainerCallback):
    """Pings at each batch of the training and of evaluations."""

    def __init__(self, call: CallWrapper) -> None:
        self._call = call

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Pings."""
        self._call.ping()

    on_substep_end = on_step_end = on_prediction_step = on_step_begin
