"""What a checkpoint of a Trainer contains besides model, optimizer and scheduler."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from typing import Any

import torch
from transformers import Trainer, TrainerState
from transformers.trainer_callback import ExportableState


class TrainerProgress:
    """The Trainer's state, and the losses of this rank that it has not logged yet.

    A `Job` saves it as a data loader, that is, rank by rank: the losses differ between ranks. Like
    the position in the data, which Trainer computes from the number of steps, it does not fit
    another number of ranks.
    """

    resizable = False

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._losses: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The state as Trainer writes it to `trainer_state.json`, and the losses."""
        trainer = self._trainer
        # Not `asdict`, which copies a long history in Python: it is turned into text at once.
        fields = dataclasses.fields(trainer.state)
        state = {field.name: getattr(trainer.state, field.name) for field in fields}
        exported: dict[str, Any] = {}
        for each in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(each, ExportableState):
                exported.setdefault(type(each).__name__, []).append(each.state())
        state["stateful_callbacks"] = exported
        saved: dict[str, Any] = {"json": json.dumps(state)}
        if self._losses is not None:  # restored, and not handed to the Trainer yet
            return {**saved, **self._losses}
        if hasattr(trainer, "_tr_loss"):
            saved["sum"] = trainer._tr_loss.item()
            saved["total"] = trainer._total_loss_scalar
            saved["logged"] = trainer._globalstep_last_logged
        return saved

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Loads the state; the losses are kept until `restore_losses`."""
        self._trainer.state = TrainerState(**json.loads(saved["json"]))
        losses = {name: value for name, value in saved.items() if name != "json"}
        self._losses = losses or None

    def restore_losses(self) -> None:
        """Gives the losses to the Trainer, once it has set its own to zero: the first loss that it
        logs, and the mean of the whole training, are then as without the restart.
        """
        losses, self._losses = self._losses, None
        if losses is not None:
            trainer = self._trainer
            trainer._tr_loss += losses["sum"]
            trainer._total_loss_scalar = losses["total"]
            trainer._globalstep_last_logged = losses["logged"]
            trainer._initial_global_step = 0


class RandomGenerators:
    """The states of Python's, NumPy's and torch's random generators, to be set again."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def set_again(self) -> None:
        """Sets the generators to the states of the constructor."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
