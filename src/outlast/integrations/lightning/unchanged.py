"""Undoes what hooks that run again, after a restore, do to what was restored."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger

from outlast.elastic.job.training_state import Backup


class OptimizerStates:
    """The states of the optimizers and schedulers at this moment."""

    def __init__(self, trainer: Trainer) -> None:
        self._optimizers = [
            (each, each.param_groups, [dict(group) for group in each.param_groups])
            for each in trainer.optimizers
        ]
        self._moments = [{p: dict(each) for p, each in o.state.items()} for o in trainer.optimizers]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._schedulers = [(each, copy.deepcopy(each.state_dict())) for each in schedulers]

    def put_back(self) -> None:
        """Whatever groups the optimizers have now, they get those of that moment."""
        for scheduler, state in self._schedulers:
            scheduler.load_state_dict(state)
        for (optimizer, present, groups), moments in zip(
            self._optimizers, self._moments, strict=True
        ):
            present[:] = groups
            optimizer.param_groups = present
            optimizer.state.clear()
            optimizer.state.update(moments)


@contextlib.contextmanager
def unchanged(trainer: Trainer) -> Iterator[None]:
    """After the block, the weights, the optimizers and the schedulers are as before. What it logs
    is not logged: the rows of before the fault are there.
    """
    module, loggers = trainer.lightning_module, trainer.loggers
    weights, optimizers = Backup(module.state_dict(), ()), OptimizerStates(trainer)
    trainer.loggers = [DummyLogger() for _ in loggers]
    try:
        yield
    finally:
        trainer.loggers = loggers
    module.load_state_dict(weights.roll_back())
    optimizers.put_back()
