"""What a training consists of, as one nested state that is saved and loaded as one."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from outlast.elastic.job import attached_states, third_party_loaders
from outlast.elastic.job.backup import Backup
from outlast.elastic.numerics import generators
from outlast.elastic.numerics.consistent_ddp import ConsistentDDP
from outlast.errors import CheckpointError

__all__ = ["Training"]

log = logging.getLogger("outlast.elastic")

_OPTIONAL = ("random.", "states.", "parts.")


class Training:
    """Binds a model, its optimizer, the place in the data, the random generators and more.

    Args:
        model: the module, as the training calls it.
        optimizer: its optimizer.
        loader: the data, if they have a state.
        states: more of what has `state_dict` and `load_state_dict`, by name.

    Attributes:
        rank, world_size: of this process.
        random: whether its random generators are part of it.

    Raises:
        ValueError: naming what has no such methods.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Any,
        states: Mapping[str, Any],
    ) -> None:
        for name, state in {"loader": loader, **states}.items():
            lacks = [m for m in ("state_dict", "load_state_dict") if not hasattr(state, m)]
            if state is not None and lacks:
                raise ValueError(
                    f"{name!r} ({type(state).__name__}) has no {' and no '.join(lacks)}"
                )
        self.model = model
        self.module = _inner(model)
        self.optimizer = optimizer
        self.loader = loader
        self.states = dict(states)
        self.rank = 0
        self.world_size = 1
        self.random = True

    def state(self) -> dict[str, Any]:
        """What is saved: the tensors themselves."""
        state: dict[str, Any] = {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        if self.loader is not None:
            state["loader"] = self._saved_of_loader()
        if self.states:
            state["states"] = {name: self._saved(each) for name, each in self.states.items()}
        if self.random:
            state["random"] = {str(self.rank): generators.capture()}
        if isinstance(self.model, ConsistentDDP):
            state["parts"] = self.model.parts_state_dict()
        return state

    # ----------------------------------------------------------------------------- loading

    def room(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What a checkpoint is loaded into; and how the names begin that one need not have, or
        that a training need not have a place for.

        The optimizer's moments, two thirds of it all, are given new memory, and are taken over by
        `apply`: those that are there now need no copy to be put back.
        """
        self._prepare_sharded()
        state = self.state()
        if third_party_loaders.is_foreign(self.loader, loads_data=True):
            state["loader"] = {}  # filled with what was saved, likewise
        for name, each in self.states.items():
            saved = state["states"][name]
            state["states"][name] = (
                {} if third_party_loaders.is_foreign(each) else attached_states.room(saved)
            )
        if self._moments_are_replaced():
            state["optimizer"] = {**state["optimizer"], "state": {}}  # filled with what was saved
            return state, _OPTIONAL
        # The checkpoint of the beginning has none of what a survivor has (`apply`).
        return state, (*_OPTIONAL, "optimizer.state.") if self.optimizer.state else _OPTIONAL

    def apply(self, state: Mapping[str, Any], *, begun: bool) -> None:
        """Loads what `room` has been filled with.

        Args:
            state: that.
            begun: whether a step had been made when it was saved.

        Raises:
            CheckpointError: naming the state that could not be loaded.
        """
        if self.loader is not None:
            self._load_loader(state["loader"], begun=begun)
        for name, each in self.states.items():
            try:
                self._load(each, state["states"][name], begun=begun)
            except Exception as e:
                raise CheckpointError(f"the state {name!r} could not be loaded: {e}") from e
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if begun:
            self._lay_out_moments()
        else:
            self.optimizer.state.clear()
        self._apply_unnamed(state)

    def backup(self) -> Backup:
        """Of all that loading may change, for `put_back`."""
        state = self.state()
        return Backup(state, state["optimizer"]["state"] if self._moments_are_replaced() else None)

    def put_back(self, before: Backup) -> None:
        """Undoes a load, as far as it went."""
        state = before.put_back()
        undone: list[tuple[str, Callable[[], object]]] = [
            ("model", lambda: self.module.load_state_dict(state["model"])),
            ("optimizer", lambda: self.optimizer.load_state_dict(state["optimizer"])),
        ]
        if self.loader is not None:
            undone.append(("loader", lambda: self._load_loader(state["loader"], begun=False)))
        for name, each in self.states.items():
            content = state["states"][name]
            undone.append((name, functools.partial(self._load, each, content, begun=False)))
        for name, undo in undone:
            try:
                undo()
            except Exception:
                log.exception("the state %r could not be put back", name)
        self._apply_unnamed(state)

    # ------------------------------------------------------------------------------ within

    def _saved_of_loader(self) -> Any:
        if third_party_loaders.is_foreign(self.loader, loads_data=True):
            return third_party_loaders.saved(self.loader, self.rank)
        return self.loader.state_dict()

    def _saved(self, source: Any) -> Any:
        if third_party_loaders.is_foreign(source):
            return third_party_loaders.saved(source, self.rank)
        return attached_states.packed(source.state_dict())

    def _load_loader(self, state: Any, *, begun: bool) -> None:
        if third_party_loaders.is_foreign(self.loader, loads_data=True):
            third_party_loaders.load(self.loader, state, self.rank, self.world_size, begun=begun)
        else:
            self.loader.load_state_dict(state)

    def _load(self, source: Any, state: Any, *, begun: bool) -> None:
        """Loads one of `states`. What is not in the checkpoint stays as it is."""
        if third_party_loaders.is_foreign(source):
            if state:
                third_party_loaders.load(source, state, self.rank, self.world_size, begun=begun)
        elif (found := attached_states.opened(state)) is not None:
            source.load_state_dict(found)

    def _apply_unnamed(self, state: Mapping[str, Any]) -> None:
        if self.random:
            states = state["random"][str(self.rank)]
            for set_one in [generators.setter(name, value) for name, value in states.items()]:
                set_one()
        if isinstance(self.model, ConsistentDDP):
            self.model.load_parts_state_dict(state["parts"])

    def _prepare_sharded(self) -> None:
        """Sharded state cannot be filled in where there is none: torch makes it, by a step of no
        length, which counts as one.
        """
        if not self.optimizer.state and any(
            isinstance(p, DTensor) for p in self.module.parameters()
        ):
            get_optimizer_state_dict(self.module, self.optimizer)

    def _moments_are_replaced(self) -> bool:
        """Whether the optimizer takes other tensors for its own when it loads them, and there is
        room for them beside: not on a GPU, and a shard is known by the tensor it is loaded into.
        """
        return type(self.optimizer).load_state_dict is Optimizer.load_state_dict and all(
            _is_plain(value)
            for moments in self.optimizer.state.values()
            for value in moments.values()
        )

    def _lay_out_moments(self) -> None:
        """As the parameters are (`torch.channels_last`): a fused optimizer goes through both by
        address, and never looks.
        """
        for parameter, moments in self.optimizer.state.items():
            if isinstance(parameter, DTensor) or parameter.is_contiguous():
                continue
            for name, value in moments.items():
                if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                    continue
                if value.stride() != parameter.stride():
                    laid_out = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                    moments[name] = laid_out.copy_(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.device.type == "cpu"
    return not isinstance(value, dict | list | tuple)


def _inner(model: nn.Module) -> nn.Module:
    if isinstance(model, DistributedDataParallel | ConsistentDDP):
        inner: nn.Module = model.module
        return inner
    return model
