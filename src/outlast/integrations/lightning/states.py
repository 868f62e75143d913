"""What a checkpoint of a Lightning fit contains besides the module, the optimizer and the data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden

from outlast.elastic import random_generators
from outlast.elastic.tensors import Backup
from outlast.integrations.lightning.checkpoint_folder import mapped

_HOOKS, _FROZEN = "(hooks)", "(frozen)"  # among the states of callbacks, by their `state_key`
_WEIGHT = "outlast weight"
_RESTORED = {"epoch", "global_step", "loops", "callbacks", "optimizer_states", "lr_schedulers"}
_MADE = {"pytorch-lightning_version", "hyper_parameters", "hparams_name", "hparams_type"}


class CallbackStates:
    """The states of the trainer's callbacks. A weight of the module that a hook adds is noted by
    its name: the job saves it. `apply` gives them what was `loaded`, which stays until it is reset.
    """

    may_differ = True  # a callback keeps what it wants

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._module = trainer, trainer.lightning_module
        self.loaded: dict[str, Any] | None = None
        have = (self._module, *trainer.callbacks)
        hooks = ("on_save_checkpoint", "on_load_checkpoint")
        self._has_hooks = any(is_overridden(hook, each) for each in have for hook in hooks)

    def state_dict(self) -> dict[str, Any]:
        if self.loaded is not None:  # nothing has happened since
            return self.loaded
        if self._has_hooks:
            checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(False)
            states = {**checkpoint["callbacks"], _HOOKS: self._added(checkpoint)}
        else:
            states = call._call_callbacks_state_dict(self._trainer)
        frozen = [name for name, each, flag in self._flags() if not getattr(each, flag)]
        return {**states, _FROZEN: frozen}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        self.loaded = states

    def apply(self) -> None:
        """Loads the states of the callbacks that are there; the others are ignored."""
        states = dict(self.loaded or {})
        added, frozen = states.pop(_HOOKS, None), states.pop(_FROZEN, None)
        checkpoint = {"callbacks": states}
        if added is not None:
            checkpoint |= self._given(copy.deepcopy(added))
            checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(False) | checkpoint
            call._call_lightning_module_hook(self._trainer, "on_load_checkpoint", checkpoint)
            call._call_callbacks_on_load_checkpoint(self._trainer, checkpoint)
        call._call_callbacks_load_state_dict(self._trainer, checkpoint)
        for name, each, flag in self._flags() if frozen is not None else ():
            setattr(each, flag, name not in frozen)

    def _added(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        def place(t: torch.Tensor) -> tuple[Any, ...]:
            return t.data_ptr(), t.dtype, t.device, tuple(t.shape), t.stride()

        weights = self._module.state_dict().items()
        names = {place(t): name for name, t in weights if isinstance(t, torch.Tensor)}

        def named(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                name = names.get(place(value)) if value.numel() else None
                return value.detach() if name is None else (_WEIGHT, name)
            return mapped(value, named)

        others = (self._trainer.precision_plugin, self._trainer.datamodule)
        known = {*_RESTORED, *_MADE, *(type(each).__qualname__ for each in others)}
        return {key: named(value) for key, value in checkpoint.items() if key not in known}

    def _given(self, value: Any) -> Any:
        """The inverse of `_added`, with copies of the weights."""
        if type(value) is tuple and len(value) == 2 and value[0] == _WEIGHT:
            return copy.deepcopy(self._module.state_dict()[value[1]])
        return mapped(value, self._given)

    def _flags(self) -> Iterator[tuple[str, Any, str]]:
        for name, parameter in self._module.named_parameters():
            yield name, parameter, "requires_grad"
        for name, module in self._module.named_modules():
            if hasattr(module, "track_running_stats"):
                yield name, module, "track_running_stats"


class LoopStates:
    """The progress of the trainer's fit loop, and what it has logged in the present epoch.

    Each step is closed at the end of its batch (`close` counts it, if there was one), before
    Lightning validates, steps the schedulers that wait for a validation, and ends the epoch. A fit
    that is resumed continues there, as if it had trained the batch itself. Lightning resumes from
    checkpoints that its `ModelCheckpoint` makes, during or after the validation, and would leave
    out the rest of the batch, and of the epoch if the batch was its last.
    """

    may_differ = True  # a callback keeps what it wants

    def __init__(self, trainer: Trainer, close: Callable[[], None]) -> None:
        self._trainer, self._loop = trainer, trainer.fit_loop
        self._batches = trainer.fit_loop.epoch_loop
        self._close, self._closing = close, False
        self._advance, self._on_advance_end = self._batches.advance, self._batches.on_advance_end
        self._batches.on_advance_end = self._end_batch
        self._generators: random_generators.Generators = {}
        self._resumed: dict[str, Any] = {}
        self._max_steps = -1

    def state_dict(self) -> dict[str, Any]:
        if self._resumed:  # nothing has happened since
            return self._resumed
        connector = self._trainer._logger_connector
        return {
            **self._loop.state_dict(),
            "closed": self._closing,
            "should_stop": self._trainer.should_stop,
            "logged": _logged(self._batches._results) if self._closing else {},
            "metrics": dict(connector._callback_metrics),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes the loop continue there. Before the first epoch it has nothing to continue."""
        if state["epoch_progress"]["total"]["ready"] == 0:
            return
        self._loop.load_state_dict(state)
        if state.get("closed"):
            self._resumed = state

    def resume(self, callbacks: CallbackStates, is_restored: bool) -> None:
        """Call it when all states are restored. After the last step, the fit still has to end the
        batch and the epoch, so the reasons to stop apply only when that has begun.
        """
        if is_restored:
            callbacks.apply()
        if not self._resumed:
            callbacks.loaded = None
            return
        self._generators = random_generators.capture()
        self._max_steps, self._batches.max_steps = self._batches.max_steps, -1
        self._batches.advance = self._resume_batch
        begin, optimizers = self._loop.on_advance_start, self._trainer.optimizers
        groups = [(each.param_groups, [*map(dict, each.param_groups)]) for each in optimizers]
        self._loop.on_advance_start = lambda: self._resume_epoch(begin, callbacks, groups)

    def _resume_epoch(self, begin: Callable[[], None], callbacks: Any, groups: Any) -> None:
        """Calls the hooks of the epoch's begin again: what they set, as `accumulate_grad_batches`,
        is saved nowhere. What was saved stays as it was, and nothing is logged twice.
        """
        trainer, module = self._trainer, self._trainer.lightning_module
        self._loop.on_advance_start = begin
        begin()
        saved = [module, *(config.scheduler for config in trainer.lr_scheduler_configs)]
        backup, loggers = Backup([each.state_dict() for each in saved], ()), trainer.loggers
        trainer.loggers = [DummyLogger() for _ in loggers]
        call._call_callback_hooks(trainer, "on_train_epoch_start")
        call._call_lightning_module_hook(trainer, "on_train_epoch_start")
        trainer.loggers = loggers
        for each, state in zip(saved, backup.roll_back(), strict=True):
            each.load_state_dict(state)
        for optimizer, (present, contents) in zip(trainer.optimizers, groups, strict=True):
            present[:] = contents
            optimizer.param_groups = present
        callbacks.apply()
        callbacks.loaded = None

    def _resume_batch(self, *_: Any) -> None:
        """Instead of training the batch that was trained before the fault."""
        self._batches.advance = self._advance
        self._batches.max_steps = self._max_steps
        self._batches.val_loop.restarting = False
        trainer, state, self._resumed = self._trainer, self._resumed, {}
        trainer.should_stop = state["should_stop"]
        connector = trainer._logger_connector
        connector._callback_metrics.update(state["metrics"])
        connector._first_loop_iter = True  # the next batch is not the first: it resets no sums
        for key, (arguments, sums) in state["logged"].items():
            results = self._batches._results
            results.log(**arguments, sync_dist_fn=trainer.strategy.reduce, batch_size=1)
            vars(results[key]).update(sums)
        # As at the end of that batch: the start of a fit may have drawn random numbers.
        random_generators.set_all(self._generators)

    def _end_batch(self, *arguments: Any) -> None:
        """The hooks of the batch's end are done. A validation belongs to no step."""
        self._closing = True
        try:
            self._close()
        finally:
            self._closing = False
        self._on_advance_end(*arguments)


def _logged(results: Any) -> dict[str, Any]:
    """The sums of `self.log(..., on_epoch=True)` in this epoch, with the arguments of `log`. Those
    of a `torchmetrics.Metric`, and over another group of ranks, are left out.
    """
    found: dict[str, Any] = {}
    for key, metric in results.items():
        meta = metric.meta
        if not metric.is_tensor or not meta.on_epoch or meta.sync.group is not None:
            continue
        names = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph")
        arguments = {name: getattr(meta, name) for name in (*names, "add_dataloader_idx")}
        arguments |= {
            "value": torch.zeros_like(metric.value),
            "reduce_fx": meta.reduce_fx.__name__,
            "metric_attribute": meta.metric_attribute,
            "sync_dist": meta.sync.should,
            "rank_zero_only": meta.sync.rank_zero_only,
        }
        sums = {
            name: value
            for name in ("value", "cumulated_batch_size", "_forward_cache")
            if (value := getattr(metric, name, None)) is not None
        }
        found[key] = [arguments, sums]
    return found


def states_of(trainer: Trainer, loops: LoopStates, callbacks: CallbackStates) -> dict[str, Any]:
    """The objects that a `Job` of this fit saves, by name."""
    states: dict[str, Any] = {
        "loops": loops,
        "callbacks": callbacks,
        "precision": trainer.precision_plugin,  # the gradient scaler of 16-bit precision
    }
    for i, config in enumerate(trainer.lr_scheduler_configs):
        states[f"scheduler{i}"] = config.scheduler
    for i, optimizer in enumerate(trainer.optimizers[1:], 1):
        states[f"optimizer{i}"] = optimizer
    if trainer.datamodule is not None:
        states["datamodule"] = trainer.datamodule
    return states
