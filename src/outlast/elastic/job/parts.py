"""The parts of a job's state beside the model and the optimizer: each saves and loads one object.

A checkpoint has what `save` returns. The live state has what `shared` and `own` have returned after
a step: the first is the same on all ranks, the second belongs to one rank alone.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from outlast.elastic import random_generators as generators
from outlast.elastic.job.encoding import (
    KEY,
    dump_plain,
    is_plain_tensor,
    load_plain,
    pack,
    packed,
    unpack,
    unpacked,
)
from outlast.elastic.numerics.consistent_ddp import ConsistentDDP
from outlast.elastic.tensors import rewrap
from outlast.elastic.wrapped_modules import load_plain as load_module
from outlast.elastic.wrapped_modules import plain_state_dict, unwrapped
from outlast.errors import CheckpointError, CheckpointMismatch

log = logging.getLogger("outlast.elastic")

Saver = Callable[[Any, Mapping[int, Any]], Any]


def load_between_steps(source: Any, state: Any) -> None:
    """Loads the state after a step into an object of `states`. A `GradScaler` that outlives a fault
    may be in the midst of a step, which its own load leaves as it is: it would refuse the next one.
    """
    source.load_state_dict(state)
    if isinstance(source, torch.amp.GradScaler) and source.is_enabled():
        source._per_optimizer_states.clear()


class Part:
    """One part of the state of a job, on one rank.

    Attributes:
        is_of_rank: whether each rank has an essential state of its own: a job of another size
            cannot continue without those of the ranks that are gone.
        needs_own: whether this process, in a job of another size, must have noted a state itself.
        mergeable: whether the states of all ranks make one for a job of another size.
        in_place: whether a checkpoint is loaded into what `save` returns now; else the target is
            filled with all that was saved.
    """

    is_of_rank = needs_own = False
    mergeable = in_place = True

    def __init__(self, source: Any) -> None:
        self._source = source

    def save(self) -> Any:
        """The state for a checkpoint; may be a collective. Nothing is saved if it is empty."""
        return self._source.state_dict()

    def with_moments(self) -> Any:
        """What `save` returns, of an optimizer after a first step, at a learning rate of 0."""
        if isinstance(self._source, Optimizer):
            _init_optim_state(self._source)
        return self.save()

    def target(self, saved: Any) -> Any:
        """What a checkpoint is loaded into, made from the result of `save`."""
        return saved if self.in_place else {}

    def load(self, state: Any, steps: int) -> None:
        """Loads the filled target: the state after `steps` steps of the job."""
        self._source.load_state_dict(state)

    def roll_back(self, name: str, state: Any, steps: int) -> None:
        """Undoes a load, however far it got: `state` is what `save` returned before."""
        try:
            self.load(state, steps)
        except Exception:
            log.exception("the state %r could not be rolled back", name)

    def shared(self) -> Any:
        """The present state that all ranks share, if there is any. Not a collective."""
        return None

    def own(self) -> Any:
        """The present state of this rank alone: plain values, to compare and to pickle."""
        return None

    def before_exchange(self, note: Callable[[], None]) -> Any:
        """If this part exchanges the gradients: `note` is called before, when its own state is that
        after the step. Returns a handle that ends this, else `None`.
        """
        return None

    def frozen(self, shared: Any) -> Any:
        """Made of it when the iteration has ended: with the tensors of which there is no copy."""
        return shared

    def live(self, shared: Any, own: Mapping[int, Any], trusted: bool) -> Any:
        """The state to load, made from noted ones. `own` has that of this rank; it is empty on a
        rank that did not exist then, and `trusted` if this process or its predecessor on this host
        has noted it.
        """
        return self.saved(shared, own)

    @staticmethod
    def saved(shared: Any, own: Mapping[int, Any]) -> Any:
        """The state for a checkpoint, made from noted ones; `own` has those of the ranks, by rank.
        The function may outlive the object.
        """
        return shared


class SamplerPart(Part):
    """An `ElasticLoader`."""

    def shared(self) -> Any:
        return self.save()


class StreamPart(Part):
    """A `ShardedStream`."""

    is_of_rank = True

    def own(self) -> Any:
        return self._source.own_state_dict()

    @staticmethod
    def saved(shared: Any, own: Mapping[int, Any]) -> Any:
        """Each rank knows of its own shards how far they are: further than the others know."""
        offsets = [max(each) for each in zip(*(o["offsets"] for o in own.values()), strict=True)]
        return {**next(iter(own.values())), "offsets": offsets}


class ThirdPartyLoader(Part):
    """A third-party data loader, such as torchdata's `StatefulDataLoader`.

    The keys of its state may differ between ranks and moments, so each rank's is saved as one
    value, and restored to that rank. At another world size, samples would be repeated and skipped,
    so the states are refused, unless they are a global position, which a true attribute `resizable`
    says. A method `resized` makes that position from the states of all ranks.

    Until the next step or epoch, its state is the one that was loaded. The loader is not asked:
    torchdata's begins an iteration then, which draws random numbers, and takes the order from the
    sampler before the program has set its epoch; accelerate's has its state of before. But once
    torchdata's was iterated, it is asked: it may have come to its end without a step.

    If `required`, a checkpoint without this state is an error. `moment` returns the number of steps
    of the job, and of the epochs that have ended since it began.
    """

    is_of_rank = True
    in_place = False

    def __init__(
        self,
        source: Any,
        rank: int,
        world_size: int,
        *,
        required: bool,
        moment: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(source)
        self._rank, self._world_size, self._required = rank, world_size, required
        self._moment = moment
        self.mergeable = getattr(source, "resizable", False)
        self._loaded: tuple[Any, Any] | None = None  # when, and the state

    def save(self) -> dict[str, Any]:
        """Keyed by rank, as a tuple, which a checkpoint stores as one value."""
        return {str(self._rank): (self._state(),)}

    def _state(self) -> Any:
        if self._loaded and self._loaded[0] == self._now():
            return self._loaded[1]
        return self._source.state_dict()

    def _now(self) -> Any:
        """Differs once there may be another state. One that is resizable can be asked at any time:
        it differs from itself.
        """
        if self._moment is None or getattr(self._source, "resizable", False):
            return object()
        return self._moment(), id(getattr(self._source, "_iterator", None))

    def load(self, state: Mapping[str, Any], steps: int) -> None:
        """Before the first step, no position in the data can be lost."""
        if not state and not self._required:
            return
        kind = type(self._source).__name__
        own = state.get(str(self._rank), state.get("0"))
        if not isinstance(own, tuple):
            raise ValueError(f"the checkpoint has no state of a {kind}")
        resized = len(state) != self._world_size
        if resized and steps and not getattr(self._source, "resizable", False):
            raise CheckpointMismatch(
                f"the {kind} was saved by {len(state)} ranks, each with its own position, and "
                f"there are {self._world_size} now: some samples would be repeated and others "
                f"skipped. Continue with {len(state)} ranks, or use outlast.elastic.ElasticLoader "
                f"or ShardedStream, which support any number (or set {kind}.resizable if it does)"
            )
        if resized and steps and hasattr(self._source, "resized"):
            own = (self._source.resized([state[str(rank)][0] for rank in range(len(state))]),)
        self._source.load_state_dict(own[0])
        self._loaded = (self._now(), own[0]) if steps else None
        if not steps:  # as before the first save, whose random numbers are restored next
            self._source.state_dict()

    def roll_back(self, name: str, state: Any, steps: int) -> None:
        super().roll_back(name, state, 0)  # only this rank's state is there

    def own(self) -> bytes:
        return dump_plain(self._state())

    def live(self, shared: Any, own: Mapping[int, Any], trusted: bool) -> dict[str, Any]:
        noted = own[self._rank]
        loaded = pickle.loads(noted) if trusted else load_plain(noted)
        # Only this rank's is read. The job has the size with which it was noted.
        return dict.fromkeys(map(str, range(self._world_size)), (loaded,))

    @staticmethod
    def saved(shared: Any, own: Mapping[int, Any]) -> Any:
        return {str(rank): (load_plain(each),) for rank, each in own.items()}


class AttachedState(Part):
    """One object in `states=`. A module is saved with the plain names of its parameters."""

    def __init__(self, source: Any) -> None:
        super().__init__(unwrapped(source) if isinstance(source, nn.Module) else source)

    def save(self) -> Any:
        return pack(self.shared())

    def target(self, saved: Any) -> Any:
        if not isinstance(saved, Mapping):
            return saved
        if all(is_plain_tensor(t) for t in tree_leaves(saved) if isinstance(t, torch.Tensor)):
            return {}  # filled with the saved keys, whatever they are
        # In place: a DTensor is resharded into the current one, and a GPU need not hold both.
        return {**saved, KEY: None}

    def load(self, state: Any, steps: int) -> None:
        """Does nothing if the checkpoint has no state for this object."""
        if isinstance(state, Mapping) and KEY not in state and isinstance(state.get("0"), tuple):
            raise CheckpointMismatch("each rank has saved its own: pass outlast.per_rank(...)")
        found = unpack(state)
        rewrap(found, self.with_moments, "state")
        if found is not None and isinstance(self._source, nn.Module):
            load_module(self._source, found)
        elif found is not None:
            load_between_steps(self._source, found)

    def shared(self) -> Any:
        if isinstance(self._source, nn.Module):
            return plain_state_dict(self._source)
        return self._source.state_dict()

    @staticmethod
    def saved(shared: Any, own: Mapping[int, Any]) -> Any:
        return pack(shared)


class ConsistentParts(Part):
    """The random numbers and statistics of the parts of a `ConsistentDDP`."""

    is_of_rank = True
    _source: ConsistentDDP

    def save(self) -> Any:
        return self._source.parts_state_dict()

    def load(self, state: Any, steps: int) -> None:
        self._source.load_parts_state_dict(state)

    def own(self) -> Any:
        return tree_map_only(torch.Tensor, packed, self._source.parts_state_dict())

    def before_exchange(self, note: Callable[[], None]) -> Any:
        return self._source.register_before_exchange(note)

    @staticmethod
    def saved(shared: Any, own: Mapping[int, Any]) -> Any:
        parts = {number: part for each in own.values() for number, part in each.items()}
        return tree_map(unpacked, parts, is_leaf=lambda value: isinstance(value, tuple))


class RandomPart(Part):
    """The random generators of this process."""

    def __init__(self, rank: int) -> None:
        self._rank, self._notes = str(rank), generators.Notes()

    def save(self) -> dict[str, generators.Generators]:
        return {self._rank: generators.capture()}

    def load(self, state: Any, steps: int) -> None:
        if self._rank in state:  # a rank that did not exist before keeps its own
            generators.set_all(state[self._rank])

    def own(self) -> dict[str, Any]:
        return self._notes.take()

    @staticmethod
    def saved(shared: Any, own: Mapping[int, Any]) -> Any:
        return {str(rank): generators.of_note(each) for rank, each in own.items()}


class NamedParts(Part):
    """Several parts of one kind, by name: those of the objects in `states=`, or the optimizers."""

    def __init__(self, parts: Mapping[str, Part], kind: str = "state") -> None:
        self._parts, self._kind = parts, kind
        self.is_of_rank = any(part.is_of_rank for part in parts.values())
        self.mergeable = all(part.mergeable for part in parts.values())
        savers = {name: part.saved for name, part in parts.items()}

        def saved(shared: Any, own: Mapping[int, Any]) -> dict[str, Any]:
            return {n: save(shared[n], _of_part(own, n)) for n, save in savers.items()}

        self.saved = saved  # type: ignore[method-assign]

    def save(self) -> dict[str, Any]:
        return {name: part.save() for name, part in self._parts.items()}

    def target(self, saved: Any) -> dict[str, Any]:
        return {name: part.target(saved[name]) for name, part in self._parts.items()}

    def load(self, state: Any, steps: int) -> None:
        """Loads all parts; an error names the one that could not be loaded."""
        for name, part in self._parts.items():
            try:
                part.load(state[name], steps)
            except Exception as e:
                kind = CheckpointMismatch if isinstance(e, CheckpointMismatch) else CheckpointError
                raise kind(f"the {self._kind} {name!r} could not be loaded: {e}") from e

    def roll_back(self, name: str, state: Any, steps: int) -> None:
        for each, part in self._parts.items():
            part.roll_back(f"{name}.{each}", state[each], steps)

    def shared(self) -> dict[str, Any]:
        return {name: part.shared() for name, part in self._parts.items()}

    def own(self) -> dict[str, Any]:
        own = {name: part.own() for name, part in self._parts.items()}
        return {name: value for name, value in own.items() if value is not None}

    def frozen(self, shared: Any) -> dict[str, Any]:
        return {name: part.frozen(shared[name]) for name, part in self._parts.items()}

    def live(self, shared: Any, own: Mapping[int, Any], trusted: bool) -> dict[str, Any]:
        return {
            name: part.live(shared[name], _of_part(own, name), trusted)
            for name, part in self._parts.items()
        }


def _of_part(own: Mapping[int, Mapping[str, Any]], name: str) -> dict[int, Any]:
    return {rank: each[name] for rank, each in own.items() if name in each}
