"""The state of a training run, as one nested state that is saved and loaded together."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from outlast.async_checkpoint.beside import Beside
from outlast.async_checkpoint.plain_values import Unsavable, encode
from outlast.async_checkpoint.state_dict import is_leaf, look_up, nodes
from outlast.async_checkpoint.subclasses import parts, wraps
from outlast.coordination.call_ledger import CallLedger
from outlast.elastic.data.loader import ElasticLoader
from outlast.elastic.data.stream import ShardedStream
from outlast.elastic.job.by_rank.equal_states import EqualStates
from outlast.elastic.job.by_rank.per_rank import PerRank, PerRankState
from outlast.elastic.job.by_rank.text_files import TextFiles
from outlast.elastic.job.counters import Counters, steps_of
from outlast.elastic.job.encoding import is_plain_tensor
from outlast.elastic.job.epochs import Epochs
from outlast.elastic.job.gradient_buckets import GradientBuckets
from outlast.elastic.job.iteration import Iteration
from outlast.elastic.job.loaded_groups import ADDED, add_groups, loaded_group
from outlast.elastic.job.model_modes import ModelModes
from outlast.elastic.job.models import ONLY, Models, Optimizers, by_name, joined, parameters_of
from outlast.elastic.job.parts import (
    AttachedState,
    ConsistentParts,
    NamedParts,
    Part,
    RandomPart,
    SamplerPart,
    StreamPart,
    ThirdPartyLoader,
)
from outlast.elastic.job.skipped import SkippedBatches
from outlast.elastic.tensors import Backup, rewrap
from outlast.elastic.wrapped_modules import consistent_ddp, load_plain, plain_state_dict
from outlast.errors import CheckpointError

_HAS_MOMENTS = "has_moments"  # part of the checkpoint's format
_OPTIONAL = (
    *("random.", "states.", "parts.", "epochs.", "iteration.", "files.", "skipped.", "buckets."),
    *("modes.",),
    "loader.global_batch_size",
)


class TrainingState:
    """Reads and writes the state of models, their optimizers, a data loader and more, as in `Job`.
    `parts` are loaded in this order: the generators last, from which others may draw.
    """

    def __init__(
        self,
        model: Models,
        optimizer: Optimizers,
        loader: Any,
        states: Mapping[str, Any],
        rank: int,
        world_size: int,
        *,
        random: bool,
    ) -> None:
        self.module, self.optimizers = joined(model), by_name(optimizer)
        more = (each for each in states.values() if isinstance(each, Optimizer))
        self.all_optimizers = [*self.optimizers.values(), *more]
        self.consistent_ddp = None if isinstance(model, Mapping) else consistent_ddp(model)
        self.counters = Counters(loader)

        def moment() -> tuple[int, int]:
            return self.counters.steps, self.epochs.ended

        self.epochs = Epochs(loader, states, rank, world_size, random=random)
        self.buckets = GradientBuckets([*by_name(model).values(), *states.values()])
        self._optimizer_parts = {
            name: OptimizerPart(each, self.module, is_named=name != ONLY)
            for name, each in self.optimizers.items()
        }
        self.parts: dict[str, Part] = {
            "counters": self.counters,
            "model": ModelPart(self.module),
            "optimizer": self._optimizer_parts.get(ONLY)
            or NamedParts(self._optimizer_parts, "optimizer"),
        }
        third_party = partial(ThirdPartyLoader, rank=rank, world_size=world_size, moment=moment)
        if isinstance(loader, ShardedStream):
            self.parts["loader"] = StreamPart(loader)
        elif isinstance(loader, ElasticLoader):
            self.parts["loader"] = SamplerPart(loader)
        elif loader is not None:
            self.parts["loader"] = third_party(loader, required=True)
        self._attached: dict[str, Part] = {
            name: third_party(each, required=False)
            if isinstance(each, DataLoader)
            else PerRankState(each, name, rank)
            if isinstance(each, PerRank)
            else AttachedState(each)
            for name, each in states.items()
        }
        if states:
            self.parts["states"] = NamedParts(self._attached)
        self.skipped = SkippedBatches(loader, self.epochs, self.counters)
        self.files = TextFiles(rank)
        self.parts |= {"epochs": self.epochs, "skipped": self.skipped, "buckets": self.buckets}
        self.parts["iteration"] = self.iteration = Iteration()
        self.parts["files"] = self.files
        self.parts["modes"] = self.modes = ModelModes(self.module)
        shared = [n for n, part in self._attached.items() if isinstance(part, AttachedState)]
        self.equal_states = EqualStates({name: states[name] for name in shared})
        if self.consistent_ddp is not None:
            self.parts["parts"] = ConsistentParts(self.consistent_ddp)
        if random:
            self.parts["random"] = RandomPart(rank)

    def stepped(self, samples: int | None) -> None:
        self.epochs.stepped(self.counters.steps + 1)
        self.buckets.note()
        self.counters.steps += 1
        self.counters.add_samples(samples)

    def state_dict(self) -> dict[str, Any]:
        """The state to save: the tensors themselves, not copies."""
        return {name: saved for name, part in self.parts.items() if (saved := part.save())}

    def beside(self, ledger: CallLedger) -> Beside:
        files = Beside(self.files.sync)
        return self.equal_states.at_save(files, ledger, self.counters.steps)

    def load_target(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What a checkpoint is loaded into; prefixes of names that it or the target may lack."""
        for part in self._optimizer_parts.values():
            part.create_sharded_moments()
        state = self.state_dict()
        target = {name: part.target(state.get(name)) for name, part in self.parts.items()}
        # A checkpoint made before the first step has no moments; this process may have some.
        of_moments = [
            f"optimizer.{name}.state." if name != ONLY else "optimizer.state."
            for name, part in self._optimizer_parts.items()
            if self.optimizers[name].state and not part.loads_anew
        ]
        return target, (*_OPTIONAL, *of_moments)

    def drop_moments(self, state: dict[str, Any], lacking: Iterable[tuple[Any, ...]]) -> None:
        """Removes from a filled target what is there of the moments of parameters that have none
        in the checkpoint, such as those of an expert that was not used yet: in this process, or by
        `create_sharded_moments`. And each other value that came later, to an optimizer that is kept
        over a restart. `lacking` are the paths that were not found.
        """
        for name, part in self._optimizer_parts.items():
            moments = (state["optimizer"] if name == ONLY else state["optimizer"][name])["state"]
            at = ("optimizer", "state") if name == ONLY else ("optimizer", name, "state")
            paths = [path[len(at) :] for path in lacking if path[: len(at)] == at]
            absent = Counter(path[0] for path in paths)
            for key, count in absent.items():
                if count == sum(is_leaf(each) for _, each in nodes(moments[key])):
                    del moments[key]
            later = [path for path in paths if path[0] in moments and not part.created]
            for path in reversed(later):  # from the end of each list
                inner = look_up(moments, path[:-1])
                if not isinstance(inner, torch.Tensor):
                    del inner[path[-1][0] if isinstance(path[-1], tuple) else path[-1]]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        steps = steps_of(state["counters"])
        for name, part in self.parts.items():
            try:
                part.load(state.get(name, {}), steps)
            except KeyError as e:  # as of torch's own optimizers, which names nothing
                raise CheckpointError(f"the state of {name!r} cannot be loaded: no {e}") from e

    def check_savable(self) -> None:
        """Raises a `ValueError` that names an object and a value that would not load as saved."""
        for name, part in self._attached.items():
            try:
                saved = part.save() if isinstance(part, PerRankState) else part.shared()
                with contextlib.suppress(RecursionError):  # `encode` says why
                    saved = tree_map(lambda each: [*parts(each)] if wraps(each) else each, saved)
                encode(saved)
            except Unsavable as e:
                raise ValueError(f"{f'states.{name}{e.where}'!r} cannot be saved: {e}") from None

    def backup(self) -> Backup:
        """A `ValueError` names a parameter of a lazy module that has no shape yet."""
        for name, each in (*self.module.named_parameters(), *self.module.named_buffers()):
            if is_lazy(each):
                raise ValueError(
                    f"the model's {name!r} is uninitialized: call the model once before "
                    "job.restore(), so that its lazy modules have their shapes"
                )
        state = self.state_dict()
        of_optimizers = state["optimizer"]
        not_copied = [
            (of_optimizers if name == ONLY else of_optimizers[name])["state"]
            for name, part in self._optimizer_parts.items()
            if part.replaces_moments
        ]
        return Backup(state, not_copied)

    def roll_back(self, backup: Backup) -> None:
        state = backup.roll_back()
        for name, part in self.parts.items():
            part.roll_back(name, state.get(name, {}), state["counters"]["steps"])


_USED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The optimizers of all jobs so far."""


class ModelPart(Part):
    """The module; after a step, the live state refers to its tensors."""

    def save(self) -> dict[str, Any]:
        return plain_state_dict(self._source)

    def load(self, state: Any, steps: int) -> None:
        rewrap(state, self.save, "model")
        load_plain(self._source, state)


class OptimizerPart(Part):
    """An optimizer; after a step, the live state refers to its tensors.

    One of several, which have names, may make its first step later than the job. So its state also
    says whether it has moments.
    """

    _source: Optimizer

    def __init__(self, optimizer: Optimizer, module: nn.Module, *, is_named: bool) -> None:
        super().__init__(optimizer)
        self._module, self._is_named = module, is_named
        self._first_added = len(getattr(optimizer, "param_groups", ()))
        self.created = False  # the present moments are those of `create_sharded_moments`
        # What a constructor makes, the first step expects. Of an optimizer that was used, nothing.
        is_new = optimizer not in _USED
        self._made_with = frozenset(optimizer.state) if is_new else frozenset()
        if is_new:
            _USED.add(optimizer)

    def save(self) -> dict[str, Any]:
        state = self._source.state_dict()
        pairs = zip(getattr(self._source, "param_groups", ()), state["param_groups"], strict=False)
        if added := [*pairs][self._first_added :]:  # in training
            names = {each: name for name, each in self._module.named_parameters()}
            for group, saved in added:
                saved[ADDED] = [names.get(each, "") for each in group["params"]]
        return {**state, _HAS_MOMENTS: bool(state["state"])} if self._is_named else state

    def target(self, saved: Any) -> Any:
        """The moments, two thirds of the state, are loaded into new memory, which the optimizer
        adopts: the current moments then need no backup. The groups are filled with what was saved:
        their number, keys and types may have changed since.
        """
        saved = {**saved, "param_groups": []}
        return {**saved, "state": {}} if self.loads_anew else saved

    def load(self, state: Any, steps: int) -> None:
        state = dict(state)
        has_moments = state.pop(_HAS_MOMENTS, True)
        del self._source.param_groups[max(self._first_added, len(state["param_groups"])) :]
        add_groups(self._source, self._module, state["param_groups"])
        pairs = zip(self._source.param_groups, [*state["param_groups"], {}], strict=False)
        is_torchs = isinstance(self._source, Optimizer)
        state["param_groups"] = [
            loaded_group(number, group, loaded, is_torchs=is_torchs)
            for number, (group, loaded) in enumerate(pairs)
        ]
        rewrap(state, self.with_moments, "optimizer")
        self._source.load_state_dict(state)
        self._keep_dtypes(state)
        if steps and has_moments:
            self._match_strides()
            return
        for each in [each for each in self._source.state if each not in self._made_with]:
            del self._source.state[each]

    def shared(self) -> list[dict[str, Any]]:
        """The hyperparameters: a scheduler changes them."""
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._source.param_groups
        ]

    def frozen(self, shared: Any) -> dict[str, Any]:
        state = self.save()
        pairs = zip(shared, state["param_groups"], strict=False)  # more may have been added since
        groups = [{**group, **each} for each, group in pairs]
        return {**state, "param_groups": groups}

    def create_sharded_moments(self) -> None:
        """Creates the moments, since a DTensor can only be loaded into an existing one. torch does
        this with a step at a learning rate of 0, which counts as a step.
        """
        parameters = list(parameters_of(self._source))
        self.created = any(isinstance(p, DTensor) for p in parameters) and not self._source.state
        if not self.created:
            return
        frozen = [each for each in parameters if not each.requires_grad]  # it may have moments
        try:
            for each in frozen:
                each.requires_grad_()
            get_optimizer_state_dict(self._module, self._source)
        finally:
            for each in frozen:
                each.requires_grad_(False)
                each.grad = None

    @property
    def replaces_moments(self) -> bool:
        """Whether the optimizer adopts the loaded tensors, and may hold the old and the new ones at
        once: not on a GPU, and not with a DTensor, which is resharded into the current one.
        """
        return type(self._source).load_state_dict is Optimizer.load_state_dict and all(
            is_plain_tensor(value) or not isinstance(value, torch.Tensor | dict | list | tuple)
            for moments in self._source.state.values()
            for value in moments.values()
        )

    @property
    def loads_anew(self) -> bool:
        """Whether the moments are loaded into new memory: what is there now may be more or less
        than was saved, such as a history. Not on a GPU, and not what is filled in place.
        """
        leaves = (leaf for each in self._source.state.values() for _, leaf in nodes(each))
        return all(not isinstance(each, torch.Tensor) or is_plain_tensor(each) for each in leaves)

    def _keep_dtypes(self, saved: dict[str, Any]) -> None:
        """Puts back what torch has converted to the type of the parameter: moments of 32 bits of
        one of 16 bits, or counts.
        """
        source: Any = self._source
        hooks = (f"_optimizer_load_state_dict_{when}_hooks" for when in ("pre", "post"))
        own = type(source).load_state_dict is not Optimizer.load_state_dict
        if own or any(getattr(source, name, None) for name in hooks):
            return
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters_of(source), strict=True):
            for name, value in saved["state"].get(number, {}).items():
                now = source.state[parameter].get(name)
                if type(now) is type(value) is torch.Tensor and now.dtype != value.dtype:
                    source.state[parameter][name] = value.to(now.device)

    def _match_strides(self) -> None:
        """Gives the moments the memory format of their parameters (`torch.channels_last`): a fused
        optimizer walks both by address, without checking that they match.
        """
        for parameter, moments in self._source.state.items():
            if isinstance(parameter, DTensor) or parameter.is_contiguous():
                continue
            for name, value in moments.items():
                if type(value) is not torch.Tensor or value.shape != parameter.shape:
                    continue
                if value.stride() != parameter.stride():
                    strided = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                    moments[name] = strided.copy_(value)


def check_stateful(loader: Any, states: Mapping[str, Any]) -> None:
    """Checks that each object has the methods that saving and loading it need."""
    for name, each in {"loader": loader, **states}.items():
        lacks = [m for m in ("state_dict", "load_state_dict") if not hasattr(each, m)]
        if each is not None and lacks:
            hint = (
                ": use outlast.elastic.ElasticLoader or torchdata's StatefulDataLoader, or leave "
                "it out, and iterate it with job.batches()"
            )
            text = f"{name!r} ({type(each).__name__}) has no {' and no '.join(lacks)}"
            raise ValueError(text + hint * isinstance(each, DataLoader))
