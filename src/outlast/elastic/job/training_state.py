"""The state of a training run, as one nested state that is saved and loaded together."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
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
from outlast.elastic.job.epochs import Epochs
from outlast.elastic.job.iteration import Iteration
from outlast.elastic.job.model_parts import GradientBuckets, ModelModes, ModelPart
from outlast.elastic.job.models import ONLY, Models, Optimizers, by_name, joined
from outlast.elastic.job.optimizer_part import OptimizerPart
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
from outlast.elastic.tensors import Backup
from outlast.elastic.wrapped_modules import consistent_ddp
from outlast.errors import CheckpointError

# Prefixes of what a checkpoint may lack, or have in addition.
_OPTIONAL = (
    "random.",
    "states.",
    "parts.",
    "epochs.",
    "iteration.",
    "files.",
    "skipped.",
    "buckets.",
    "modes.",
    "loader.global_batch_size",
)


class TrainingState:
    """Reads and writes the state of models, their optimizers, a data loader and more, as in `Job`.
    `parts` are loaded in this order: the generators last, from which others may draw. `max_skips`:
    see `SkippedBatches`.
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
        max_skips: int | None = None,
    ) -> None:
        self.module, self.optimizers = joined(model), by_name(optimizer)
        self.alike: Sequence[int] = ()  # the ranks with the same parts, if others have others
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
        self.skipped = SkippedBatches(loader, self.epochs, self.counters, max_skips)
        self.files = TextFiles(rank)
        self.parts |= {"epochs": self.epochs, "skipped": self.skipped, "buckets": self.buckets}
        self.parts["iteration"] = self.iteration = Iteration()
        self.parts["files"] = self.files
        self.parts["modes"] = self.modes = ModelModes(self.module)
        shared = [n for n, part in self._attached.items() if isinstance(part, AttachedState)]
        self.equal_states = EqualStates({name: states[name] for name in shared}, self.optimizers)
        if self.consistent_ddp is not None:
            self.parts["parts"] = ConsistentParts(self.consistent_ddp)
        if random:
            self.parts["random"] = RandomPart(rank)

    def check_modes(self, rank: int) -> None:
        added = [name for part in self._optimizer_parts.values() for name in part.added]
        self.modes.check(rank, self.counters.steps + 1, added)

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
            ".".join((*_moments_at(name), ""))
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
            at = _moments_at(name)
            moments = look_up(state, at)
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

    def add_noted(
        self,
        state: dict[str, Any],
        own: Mapping[int, Any],
        of_all: Mapping[int, Any],
        trusted: bool,
    ) -> None:
        """Adds to a live state what ranks have noted of their own: see `Part.live`. `of_all` has
        that of all ranks, if their number has changed and a part needs it.
        """
        for name, part in self.parts.items():
            merges = of_all and (part.is_of_rank or part.needs_own)
            noted = {
                r: each[name] for r, each in (of_all if merges else own).items() if name in each
            }
            found = state.get(name)
            value = part.saved(found, noted) if merges else part.live(found, noted, trusted)
            if value is not None:
                state[name] = value

    def check_savable(self) -> None:
        """Raises a `ValueError` that names an object and a value that would not load as saved, or a
        parameter of a lazy module that has no shape yet.
        """
        for name, each in (*self.module.named_parameters(), *self.module.named_buffers()):
            if is_lazy(each):
                raise ValueError(
                    f"the model's {name!r} is uninitialized: call the model once before "
                    "job.restore(), so that its lazy modules have their shapes"
                )
        for name, part in self._attached.items():
            try:
                saved = part.save() if isinstance(part, PerRankState) else part.shared()
                with contextlib.suppress(RecursionError):  # `encode` says why
                    saved = tree_map(lambda each: [*parts(each)] if wraps(each) else each, saved)
                encode(saved)
            except Unsavable as e:
                raise ValueError(f"{f'states.{name}{e.where}'!r} cannot be saved: {e}") from None

    def backup(self) -> Backup:
        state = self.state_dict()
        not_copied = [
            look_up(state, _moments_at(name))
            for name, part in self._optimizer_parts.items()
            if part.replaces_moments
        ]
        return Backup(state, not_copied)

    def roll_back(self, backup: Backup) -> None:
        state = backup.roll_back()
        for name, part in self.parts.items():
            part.roll_back(name, state.get(name, {}), state["counters"]["steps"])


def _moments_at(name: str) -> tuple[str, ...]:
    """Where the moments of the optimizer of this name are in the state of a job."""
    return ("optimizer", "state") if name == ONLY else ("optimizer", name, "state")


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
