"""What callbacks save, what hooks add to Lightning's own checkpoint, and what is frozen."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden

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
