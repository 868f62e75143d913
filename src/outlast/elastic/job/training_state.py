"""The state of a training run, as one nested state that is saved and loaded together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from outlast.async_checkpoint.plain_values import Unsavable, encode
from outlast.elastic import random_generators
from outlast.elastic.data.loader import ElasticLoader
from outlast.elastic.job.attached_states import AttachedState, is_plain_tensor
from outlast.elastic.job.backup import Backup
from outlast.elastic.job.epochs.epochs import Epochs
from outlast.elastic.job.gradient_buckets import GradientBuckets
from outlast.elastic.job.third_party_loaders import ThirdPartyLoader, is_third_party
from outlast.elastic.wrapped_modules import (
    consistent_ddp,
    load_plain,
    plain_state_dict,
    unwrapped,
)
from outlast.errors import CheckpointError, CheckpointMismatch

log = logging.getLogger("outlast.elastic")

_OPTIONAL = ("random.", "states.", "parts.", "epochs.", "buckets.", "loader.global_batch_size")


class TrainingState:
    """Reads and writes the state of a model, its optimizer, its data loader and more.

    The arguments are those of `Job`; `rank` and `world_size` are those of this process.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Any,
        states: Mapping[str, Any],
        *,
        rank: int,
        world_size: int,
        random: bool,
    ) -> None:
        self.model = model
        self.module = unwrapped(model)
        self.consistent_ddp = consistent_ddp(model)
        self.optimizer = optimizer
        self.loader = loader
        self.states = dict(states)
        self._rank = rank
        self._world_size = world_size
        self._random = random
        self.epochs = Epochs(loader, states, rank=rank, world_size=world_size, random=random)
        self.buckets = GradientBuckets([model, *states.values()])

    def stepped(self, steps: int) -> None:
        """A step was made: the job has made `steps`."""
        self.epochs.stepped(steps)
        self.buckets.note()

    def state_dict(self) -> dict[str, Any]:
        """The state to save: the tensors themselves, not copies."""
        state: dict[str, Any] = {
            "model": plain_state_dict(self.module),
            "optimizer": self.optimizer.state_dict(),
        }
        if self.loader is not None:
            state["loader"] = self._loader().save()
        if self.states:
            state["states"] = {name: self._attached(name).save() for name in self.states}
        if self._random:
            state["random"] = {str(self._rank): random_generators.capture()}
        if self.consistent_ddp is not None:
            state["parts"] = self.consistent_ddp.parts_state_dict()
        if epochs := self.epochs.state_dict():
            state["epochs"] = epochs
        if buckets := self.buckets.state_dict():
            state["buckets"] = buckets
        return state

    def shared_state(self) -> dict[str, Any]:
        """What is the same on all ranks, besides the model and the optimizer, and is saved without
        a collective. The "states" are those of the objects, before `pack`.
        """
        state: dict[str, Any] = {"states": {}}
        if isinstance(self.loader, ElasticLoader):
            state["loader"] = self._loader().save()
        for name, source in self.states.items():
            if not is_third_party(source):
                state["states"][name] = AttachedState(source).state()
        if epochs := self.epochs.shared_state():
            state["epochs"] = epochs
        if buckets := self.buckets.state_dict():
            state["buckets"] = buckets
        return state

    def load_target(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The nested state that a checkpoint is loaded into, and the prefixes of the names that may
        be missing in the checkpoint or in the target.

        The optimizer's moments, two thirds of the state, are loaded into new memory, which
        `load_state_dict` hands to the optimizer: the current moments then need no backup.
        """
        self._create_sharded_moments()
        state = {**self.state_dict(), "epochs": {}, "buckets": {}}  # filled with the saved ones
        if self.loader is not None:
            state["loader"] = self._loader().load_target(state["loader"])
        for name in self.states:
            state["states"][name] = self._attached(name).load_target(state["states"][name])
        if self._replaces_moments():
            state["optimizer"] = {**state["optimizer"], "state": {}}  # filled with the saved ones
            return state, _OPTIONAL
        # A checkpoint made before the first step has no moments; this process may have some.
        return state, (*_OPTIONAL, "optimizer.state.") if self.optimizer.state else _OPTIONAL

    def load_state_dict(self, state: Mapping[str, Any], *, started: bool) -> None:
        """Loads the target and the counters, filled from a checkpoint: one made after the first
        step if `started`.

        Raises:
            CheckpointMismatch: as `Epochs.load_state_dict`.
            CheckpointError: naming the state that could not be loaded.
        """
        if self.loader is not None:
            self._loader().load(state["loader"], started=started)
        for name in self.states:
            try:
                self._attached(name).load(state["states"][name], started=started)
            except Exception as e:
                kind = CheckpointMismatch if isinstance(e, CheckpointMismatch) else CheckpointError
                raise kind(f"the state {name!r} could not be loaded: {e}") from e
        load_plain(self.module, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if started:
            self._match_strides()
        else:
            self.optimizer.state.clear()
        self.epochs.load_state_dict(state.get("epochs", {}), int(state["counters"]["steps"]))
        self._load_others(state)

    def check_savable(self) -> None:
        """Checks that the additional objects' states come back from a checkpoint as they are.

        Raises:
            ValueError: naming the object and the value that would not.
        """
        for name, source in self.states.items():
            if is_third_party(source):
                continue
            try:
                encode(AttachedState(source).state())
            except Unsavable as e:
                raise ValueError(f"{f'states.{name}{e.where}'!r} cannot be saved: {e}") from None

    def backup(self) -> Backup:
        """A copy of everything that loading may change, for `roll_back`."""
        state = self.state_dict()
        return Backup(state, state["optimizer"]["state"] if self._replaces_moments() else None)

    def roll_back(self, backup: Backup) -> None:
        """Undoes a load, however far it got."""
        state = backup.roll_back()
        loads: dict[str, Callable[[], object]] = {
            "model": partial(load_plain, self.module, state["model"]),
            "optimizer": partial(self.optimizer.load_state_dict, state["optimizer"]),
        }
        if self.loader is not None:
            loads["loader"] = partial(self._loader().load, state["loader"], started=False)
        for name in self.states:
            saved = state["states"][name]
            loads[f"states.{name}"] = partial(self._attached(name).load, saved, started=False)
        for name, load in loads.items():
            try:
                load()
            except Exception:
                log.exception("the state %r could not be rolled back", name)
        self.epochs.load_state_dict(state.get("epochs", {}), self.epochs.steps)
        self._load_others(state)

    def _loader(self) -> _Adapter:
        if is_third_party(self.loader, is_loader=True):
            return ThirdPartyLoader(self.loader, self._rank, self._world_size, required=True)
        return _OwnLoader(self.loader)

    def _attached(self, name: str) -> _Adapter:
        source = self.states[name]
        if is_third_party(source):
            return ThirdPartyLoader(source, self._rank, self._world_size, required=False)
        return AttachedState(source)

    def _load_others(self, state: Mapping[str, Any]) -> None:
        self.buckets.load_state_dict(state.get("buckets", {}))
        if self._random:
            random_generators.set_all(state["random"][str(self._rank)])
        if self.consistent_ddp is not None:
            self.consistent_ddp.load_parts_state_dict(state["parts"])

    def _create_sharded_moments(self) -> None:
        """Creates the moments, since a DTensor can only be loaded into an existing one. torch does
        this with a step at a learning rate of 0, which counts as a step.
        """
        if not self.optimizer.state and any(
            isinstance(p, DTensor) for p in self.module.parameters()
        ):
            get_optimizer_state_dict(self.module, self.optimizer)

    def _replaces_moments(self) -> bool:
        """Whether the optimizer adopts the loaded tensors, and may hold the old and the new ones at
        once: not on a GPU, and not with a DTensor, which is resharded into the current one.
        """
        return type(self.optimizer).load_state_dict is Optimizer.load_state_dict and all(
            is_plain_tensor(value) or not isinstance(value, torch.Tensor | dict | list | tuple)
            for moments in self.optimizer.state.values()
            for value in moments.values()
        )

    def _match_strides(self) -> None:
        """Gives the moments the memory format of their parameters (`torch.channels_last`): a fused
        optimizer walks both by address, without checking that they match.
        """
        for parameter, moments in self.optimizer.state.items():
            if isinstance(parameter, DTensor) or parameter.is_contiguous():
                continue
            for name, value in moments.items():
                if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                    continue
                if value.stride() != parameter.stride():
                    strided = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                    moments[name] = strided.copy_(value)


class _Adapter(Protocol):
    """Saves and loads one object's state."""

    def save(self) -> Any: ...
    def load_target(self, saved: Any) -> Any: ...
    def load(self, state: Any, *, started: bool) -> None: ...


class _OwnLoader:
    """A loader of this library: its state is the same on all ranks, and fits any world size."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def save(self) -> Any:
        return self._source.state_dict()

    def load_target(self, saved: Any) -> Any:
        return saved

    def load(self, state: Any, *, started: bool) -> None:
        self._source.load_state_dict(state)


def check_stateful(loader: Any, states: Mapping[str, Any]) -> None:
    """Checks that each object has the methods that saving and loading it need.

    Raises:
        ValueError: naming the first object that lacks one, and the methods.
    """
    for name, each in {"loader": loader, **states}.items():
        lacks = [m for m in ("state_dict", "load_state_dict") if not hasattr(each, m)]
        if each is not None and lacks:
            hint = ""
            if isinstance(each, DataLoader):
                hint = (
                    ": use outlast.elastic.ElasticLoader or torchdata's StatefulDataLoader, or "
                    "leave it out, and a job that resumes begins its epoch again"
                )
            raise ValueError(
                f"{name!r} ({type(each).__name__}) has no {' and no '.join(lacks)}{hint}"
            )
