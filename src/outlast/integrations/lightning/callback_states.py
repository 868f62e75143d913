"""What callbacks save, and what hooks add to Lightning's own checkpoint."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.modules.batchnorm import _BatchNorm

_HOOKS, _FROZEN = "(hooks)", "(frozen)"  # among the states of callbacks, by their `state_key`
_WEIGHT = "outlast weight"
_HAS = ("epoch", "global_step", "pytorch-lightning_version", "loops", "callbacks")
_HAS += ("optimizer_states", "lr_schedulers", "hyper_parameters")  # restored, or made again


class CallbackStates:
    """The states of the trainer's callbacks, what the hooks `on_save_checkpoint` of callbacks and
    module add, and which parts of the module are frozen (no Lightning checkpoint has that).

    The hooks get the checkpoint that Lightning makes. A tensor in there that is one of the module
    is kept by its name: the job saves it anyway. What is loaded is applied by `apply`, when all is
    restored, and only then if something was.
    """

    may_differ = True  # a callback keeps what it wants

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._module = trainer, trainer.lightning_module
        self._loaded: dict[str, Any] | None = None
        self._has_hooks = any(
            is_overridden(hook, each)
            for each in (self._module, *trainer.callbacks)
            for hook in ("on_save_checkpoint", "on_load_checkpoint")
        )

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:  # nothing has happened since
            return self._loaded
        if self._has_hooks:
            checkpoint = self._checkpoint()
            states = {**checkpoint["callbacks"], _HOOKS: self._added(checkpoint)}
        else:
            states = call._call_callbacks_state_dict(self._trainer)
        parameters = self._module.named_parameters()
        frozen = [name for name, each in parameters if not each.requires_grad]
        norms = [name for name, each in self._norms() if not each.track_running_stats]
        return {**states, _FROZEN: [frozen, norms]}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        self._loaded = states

    def apply(self) -> None:
        """Loads the states of the callbacks that are there; the others are ignored."""
        states = dict(self._loaded or {})
        added, frozen = states.pop(_HOOKS, None), states.pop(_FROZEN, None)
        checkpoint = {"callbacks": states}
        if added is not None:
            weights = {name: (_WEIGHT, name) for name in self._module.state_dict()}
            found = self._given(copy.deepcopy({"state_dict": weights, **added}))
            checkpoint = {**self._checkpoint(), **found, **checkpoint}
            call._call_lightning_module_hook(self._trainer, "on_load_checkpoint", checkpoint)
            call._call_callbacks_on_load_checkpoint(self._trainer, checkpoint)
        call._call_callbacks_load_state_dict(self._trainer, checkpoint)
        if frozen is not None:
            for name, parameter in self._module.named_parameters():
                parameter.requires_grad_(name not in frozen[0])
            for name, norm in self._norms():
                norm.track_running_stats = name not in frozen[1]

    def release(self) -> None:
        """Nothing is to be applied, or no more."""
        self._loaded = None

    def _checkpoint(self) -> dict[str, Any]:
        checkpoint: dict[str, Any] = self._trainer._checkpoint_connector.dump_checkpoint(False)
        return checkpoint

    def _added(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """What the hooks have added to the checkpoint; the weights only if they have changed."""
        weights = self._module.state_dict().items()
        names = {_place(each): name for name, each in weights if isinstance(each, torch.Tensor)}

        def named(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                name = names.get(_place(value)) if value.numel() else None
                return value.detach() if name is None else (_WEIGHT, name)
            return _mapped(value, named)

        module, data = self._module, self._trainer.datamodule
        has = {*_HAS, type(self._trainer.precision_plugin).__qualname__, type(data).__qualname__}
        has |= {module.CHECKPOINT_HYPER_PARAMS_NAME, module.CHECKPOINT_HYPER_PARAMS_TYPE}
        added = {key: named(value) for key, value in checkpoint.items() if key not in has}
        own = named(dict(weights))
        if added.get("state_dict", {}).keys() == own.keys() and all(
            type(each) is tuple and each == own[name] for name, each in added["state_dict"].items()
        ):
            del added["state_dict"]
        return added

    def _given(self, added: Any) -> Any:
        """The inverse of `_added`, with copies of the weights."""
        weights = self._module.state_dict()

        def given(value: Any) -> Any:
            if type(value) is tuple and len(value) == 2 and value[0] == _WEIGHT:
                return copy.deepcopy(weights[value[1]])
            return _mapped(value, given)

        return given(added)

    def _norms(self) -> list[tuple[str, Any]]:
        """freezing a batch norm also stops its statistics."""
        named = self._module.named_modules()
        return [(name, each) for name, each in named if isinstance(each, _BatchNorm)]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value`; a container with `function` applied to what it holds."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, function(inner)) for key, inner in value.items())
    return type(value)(map(function, value)) if type(value) in (list, tuple) else value
