"""What a checkpoint of a Lightning fit contains besides the module, the optimizer and the data."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer


class LoopStates:
    """The progress of the trainer's fit loop.

    Lightning resumes a loop from a state that its own `ModelCheckpoint` saves. `JobCallback` also
    saves at the start of an epoch, before the progress within the epoch is set back.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop

    def state_dict(self) -> dict[str, Any]:
        """The progress, as Lightning saves it."""
        state: dict[str, Any] = self._loop.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the loop continue there. Before the first epoch it has nothing to continue."""
        epochs = state["epoch_progress"]["total"]
        if epochs["ready"] == 0:
            return
        self._loop.load_state_dict(state)
        if epochs["started"] < epochs["ready"]:  # saved in `on_train_epoch_start`
            self._loop.epoch_loop.restarting = False  # the epoch has yet to begin


class CallbackStates:
    """The states of the trainer's other callbacks, by their `state_key`, as one state."""

    def __init__(self, trainer: Trainer, without: Callback) -> None:
        self._trainer, self._without = trainer, without

    def state_dict(self) -> dict[str, Any]:
        """The state of each callback that has one."""
        return {each.state_key: state for each in self._callbacks() if (state := each.state_dict())}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Loads the states of the callbacks that are there; the others are ignored."""
        for each in self._callbacks():
            if each.state_key in states:
                each.load_state_dict(states[each.state_key])

    def _callbacks(self) -> list[Callback]:
        return [each for each in self._trainer.callbacks if each is not self._without]


def states_of(trainer: Trainer, callback: Callback) -> dict[str, Any]:
    """The objects that a `Job` of this fit saves, by name."""
    states: dict[str, Any] = {
        "loops": LoopStates(trainer),
        "callbacks": CallbackStates(trainer, callback),
        "precision": trainer.precision_plugin,  # the gradient scaler of 16-bit precision
    }
    for i, config in enumerate(trainer.lr_scheduler_configs):
        states[f"scheduler{i}"] = config.scheduler
    for i, optimizer in enumerate(trainer.optimizers[1:], 1):
        states[f"optimizer{i}"] = optimizer
    if trainer.datamodule is not None:
        states["datamodule"] = trainer.datamodule
    return states
