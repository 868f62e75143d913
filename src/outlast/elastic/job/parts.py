"""The parts of a job's state beside the model and the optimizer: each saves and loads one object.

A checkpoint has what `save` returns. The live state, which survivors continue from, has what
`shared` and `own` have returned after a step: the first is the same on all ranks, the second
belongs to one rank alone, and consists of plain values.
"""

from __future__ import annotations

import array
import ctypes
import logging
import pickle
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from outlast.elastic import random_generators as generators
from outlast.elastic.job.encoding import (
    KEY,
    is_plain_tensor,
    load_plain,
    pack,
    packed,
    unpack,
    unpacked,
)
from outlast.elastic.numerics.consistent_ddp import ConsistentDDP
from outlast.elastic.wrapped_modules import load_plain as load_module
from outlast.elastic.wrapped_modules import plain_state_dict, unwrapped
from outlast.errors import CheckpointError, CheckpointMismatch

log = logging.getLogger("outlast.elastic")

_TWISTER_BYTES = 2500  # of NumPy's Mersenne Twister: 624 words and the position


class Part:
    """One part of the state of a job, on one rank.

    Attributes:
        is_of_rank: whether each rank has an essential state of its own. It is then known only when
            a step is complete, and a job of another size cannot continue without those of the
            ranks that are gone.
    """

    is_of_rank = False

    def __init__(self, source: Any) -> None:
        self._source = source

    def save(self) -> Any:
        """The state for a checkpoint; may be a collective. Nothing is saved if it is empty."""
        return self._source.state_dict()

    def target(self, saved: Any) -> Any:
        """What a checkpoint is loaded into, made from the result of `save`."""
        return saved

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

    def frozen(self, shared: Any) -> Any:
        """The state that all ranks share, when the iteration has ended, made from that noted after
        the last step: with the tensors of which `shared` has taken no copy.
        """
        return shared

    def live(self, shared: Any, own: Any, trusted: bool) -> Any:
        """The state to load, made from noted ones. `own` is `None` on a rank that did not exist
        then; it is `trusted` if this process or its predecessor on this host has noted it.
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

    def live(self, shared: Any, own: Any, trusted: bool) -> Any:
        return own


class ThirdPartyLoader(Part):
    """A third-party data loader, such as torchdata's `StatefulDataLoader`.

    The loader defines the structure of its state: keys may differ between ranks, and between the
    middle of an epoch and its start. So each rank's state is saved as one value, and restored to
    that rank. At another world size only the loader itself can interpret the states (torchdata's
    count what one rank has consumed), so they are refused: samples would be repeated and skipped. A
    loader whose state is a global position declares this with a true attribute `resizable`. With a
    method `resized`, it makes that position from the states of all ranks.

    Until the next step or epoch, its state is the one that was loaded. The loader is not asked:
    torchdata's begins an iteration then, which draws random numbers, and takes the order from the
    sampler before the program has set its epoch; accelerate's has its state of before. But once
    torchdata's was iterated, it is asked: it may have come to its end without a step.

    If `required`, a checkpoint without this state is an error. `moment` returns the number of steps
    of the job, and of the epochs that have ended since it began.
    """

    is_of_rank = True

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

    def target(self, saved: Any) -> dict[str, Any]:
        return {}  # filled with the states of all ranks

    def load(self, state: Mapping[str, Any], steps: int) -> None:
        """Loads this rank's state from those of all ranks; at another world size, an error unless
        the loader is resizable. Before the first step, no position in the data can be lost.
        """
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
        if resized and hasattr(self._source, "resized"):
            own = (self._source.resized([state[str(rank)][0] for rank in range(len(state))]),)
        self._source.load_state_dict(own[0])
        self._loaded = (self._now(), own[0]) if steps else None
        if not steps:  # as before the first save, whose random numbers are restored next
            self._source.state_dict()

    def roll_back(self, name: str, state: Any, steps: int) -> None:
        super().roll_back(name, state, 0)  # only this rank's state is there

    def own(self) -> bytes:
        return pickle.dumps(self._state())

    def live(self, shared: Any, own: Any, trusted: bool) -> dict[str, Any]:
        loaded = pickle.loads(own) if trusted else load_plain(own)
        # Only this rank's is read. The job has the size with which it was noted.
        return dict.fromkeys(map(str, range(self._world_size)), (loaded,))


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
        found = unpack(state)
        if found is not None and isinstance(self._source, nn.Module):
            load_module(self._source, found)
        elif found is not None:
            self._source.load_state_dict(found)

    def shared(self) -> Any:
        if isinstance(self._source, nn.Module):
            return plain_state_dict(self._source)
        return self._source.state_dict()

    def live(self, shared: Any, own: Any, trusted: bool) -> Any:
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

    def live(self, shared: Any, own: Any, trusted: bool) -> Any:
        return tree_map(unpacked, own, is_leaf=lambda value: isinstance(value, tuple))


class RandomPart(Part):
    """The random generators of this process. Most programs draw from one of them, or from none: a
    state that has not changed since `own` was called last is not converted again.
    """

    def __init__(self, rank: int) -> None:
        self._rank = str(rank)
        self._python: tuple[Any, ...] = ()
        self._python_noted: tuple[Any, ...] = ()
        self._numpy: tuple[Any, ...] | None = None
        self._twister = b""

    def save(self) -> dict[str, generators.Generators]:
        return {self._rank: generators.capture()}

    def load(self, state: Any, steps: int) -> None:
        generators.set_all(state[self._rank])

    def own(self) -> dict[str, Any]:
        python = random.getstate()
        if python != self._python:
            version, numbers, gauss = self._python = python
            self._python_noted = version, array.array("Q", numbers).tobytes(), gauss
        noted: dict[str, Any] = {
            "python": self._python_noted,
            "torch": torch.get_rng_state().numpy().tobytes(),
        }
        if "numpy" in sys.modules:
            noted["numpy"] = self._of_numpy(sys.modules["numpy"])
        of_devices = generators.of_devices()
        return noted | {name: state.numpy().tobytes() for name, state in of_devices.items()}

    def live(self, shared: Any, own: Any, trusted: bool) -> dict[str, generators.Generators]:
        if own is None:  # a rank that did not exist before keeps its own
            return self.save()
        found: generators.Generators = {}
        for name, state in own.items():
            if name == "python":
                version, numbers, gauss = state
                words = torch.frombuffer(bytearray(numbers), dtype=torch.int64)
                found[name] = generators.of_python((version, words.tolist(), gauss))
            elif name != "numpy":
                found[name] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
            elif state is not None:
                kind, keys, *rest = state
                words = torch.frombuffer(bytearray(keys), dtype=torch.int32).to(torch.int64)
                found[name] = generators.of_numpy((kind, (words & 0xFFFFFFFF).tolist(), *rest))
        return {self._rank: found}

    def _of_numpy(self, numpy: Any) -> tuple[Any, ...] | None:
        """The state of NumPy's generator; `None` if it is not a Mersenne Twister.

        `get_state` takes ten times as long as all else here. Its result is the same as before if
        the words and the position are the same, unless it holds the second of two normal numbers,
        which may have been drawn since.
        """
        generator = numpy.random.get_bit_generator()
        if type(generator).__name__ != "MT19937":
            return None
        twister = ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES)
        known = self._numpy
        if known is None or known[3] or twister != self._twister:
            name, keys, position, has_gauss, cached = numpy.random.get_state()
            self._numpy = (name, keys.tobytes(), int(position), int(has_gauss), float(cached))
            self._twister = twister
        return self._numpy


class NamedParts(Part):
    """Several parts of one kind, by name: those of the objects in `states=`, or the optimizers."""

    def __init__(self, parts: Mapping[str, Part], kind: str = "state") -> None:
        self._parts, self._kind = parts, kind
        self.is_of_rank = any(part.is_of_rank for part in parts.values())

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

    def live(self, shared: Any, own: Any, trusted: bool) -> dict[str, Any]:
        return {
            name: part.live(shared[name], (own or {}).get(name), trusted)
            for name, part in self._parts.items()
        }
