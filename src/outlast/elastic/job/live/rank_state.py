"""The part of a training state that belongs to one rank alone, after each step.

These are its random generators, the order of its batches (`Epochs.own_state`), its position in the
data if it is not the same on all ranks, the
state of its parts (`ConsistentDDP`), and buffers such as the statistics of a batch norm: these
change during the forward pass, and may differ between replicas. They are noted by value, after
every step, as values that can be compared and pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from outlast.elastic.data.stream import ShardedStream
from outlast.elastic.job.live.encoding import load_plain
from outlast.elastic.job.live.generator_states import GeneratorStates, restored
from outlast.elastic.job.live.point import digest
from outlast.elastic.job.third_party_loaders import is_third_party
from outlast.elastic.job.training_state import TrainingState

State = dict[str, Any]


# Small buffers are noted every time.
_SMALL_BYTES = 64 << 10


class Buffers:
    """The persistent buffers of a module. Large ones are only noted if they have changed.

    A buffer may be written to or replaced, so it is looked up by its name each time. Only a digest
    of its contents tells whether it has changed: the kernel of a batch norm and programs that write
    through `.data` (averages in a codebook) do so uncounted by torch, and `DistributedDataParallel`
    writes the same contents again.
    """

    def __init__(self, entries: Mapping[str, Any], module: nn.Module) -> None:
        owners = {
            id(buffer): (inner._buffers, key)
            for inner in module.modules()
            for key, buffer in inner._buffers.items()
            if buffer is not None
        }
        self._owners = {
            name: owners[id(entry)]
            for name, entry in entries.items()
            if not isinstance(entry, nn.Parameter) and id(entry) in owners
        }
        self.initial = {name: self._present(name).detach().clone() for name in self._owners}
        self._seen = {name: self._mark(name) for name in self._owners}
        self._noted: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._owners

    def note(self) -> dict[str, Any]:
        """The contents of the buffers, except large ones that have not changed since this object
        was created.
        """
        for name in self._owners:
            mark = self._mark(name)
            if not mark or mark != self._seen[name]:
                self._noted[name] = packed(self._present(name))
                self._seen[name] = mark
        return dict(self._noted)

    def _present(self, name: str) -> torch.Tensor:
        buffers, key = self._owners[name]
        found = buffers[key]
        assert found is not None
        return found

    def _mark(self, name: str) -> str:
        """Changes with the contents; empty for a small buffer."""
        buffer = self._present(name)
        if buffer.nbytes <= _SMALL_BYTES:
            return ""
        return f"{buffer.dtype} {tuple(buffer.shape)} {digest(buffer)}"


def is_simple(training: TrainingState) -> bool:
    """Whether a rank's own state is no more than generators and buffers. It is then known as soon
    as the rank has computed its gradients; and a job of another size can do without the states of
    ranks that are gone.
    """
    loaders = [s for s in training.states.values() if is_third_party(s)]
    if is_third_party(training.loader, is_loader=True):
        loaders.append(training.loader)
    is_stream = isinstance(training.loader, ShardedStream)
    return training.consistent_ddp is None and not is_stream and not loaders


class RankState:
    """Notes the state of this rank."""

    def __init__(self, training: TrainingState, buffers: Buffers, *, random: bool) -> None:
        self._training = training
        self._buffers = buffers
        self._generators = GeneratorStates() if random else None
        # Loaders whose state belongs to the rank.
        self._loaders = {n: s for n, s in training.states.items() if is_third_party(s)}
        loader = training.loader
        self._stream = loader if isinstance(loader, ShardedStream) else None
        self._loader = loader if is_third_party(loader, is_loader=True) else None

    def note(self) -> State:
        """The state of this rank now."""
        state: State = {"buffers": self._buffers.note()}
        if self._generators is not None:
            state["random"] = self._generators.note()
        if own := self._training.epochs.own_state():
            state["epochs"] = own
        if self._stream is not None:
            state["stream"] = self._stream.own_state_dict()
        if self._loader is not None:
            state["loader"] = pickle.dumps(self._loader.state_dict())
        if self._loaders:
            state["states"] = {n: pickle.dumps(s.state_dict()) for n, s in self._loaders.items()}
        parts = self._training.consistent_ddp
        if parts is not None:
            state["parts"] = _packed_tree(parts.parts_state_dict())
        return state


def insert(
    noted: State, state: dict[str, Any], rank: int, world_size: int, *, trusted: bool = False
) -> None:
    """Puts a noted state of a rank into the nested state that `TrainingState` loads.

    The state of a loader is expected from every rank, and only this rank's is read: the decision
    has made sure that the job still has the size with which these states were noted. It may be of
    any type if it is `trusted`: if this process, or its predecessor on this host, has noted it.

    Raises:
        ValueError: if the state of a loader is not trusted, and is more than plain values.
    """

    def of_all_ranks(pickled: bytes) -> dict[str, tuple[Any]]:
        loaded = pickle.loads(pickled) if trusted else load_plain(pickled)
        return dict.fromkeys(map(str, range(world_size)), (loaded,))

    for name, value in noted["buffers"].items():
        state["model"][name] = unpacked(value)
    if "random" in noted:
        state["random"] = {str(rank): restored(noted["random"])}
    if "epochs" in noted:
        state["epochs"] = {**state.get("epochs", {}), str(rank): noted["epochs"]}
    if "stream" in noted:
        state["loader"] = noted["stream"]
    if "loader" in noted:
        state["loader"] = of_all_ranks(noted["loader"])
    for name, value in noted.get("states", {}).items():
        state["states"][name] = of_all_ranks(value)
    if "parts" in noted:
        state["parts"] = _unpacked_tree(noted["parts"])


def packed(tensor: torch.Tensor) -> tuple[str, list[int], bytes]:
    """A tensor as plain values."""
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), content.numpy().tobytes()


def unpacked(value: tuple[str, list[int], bytes]) -> torch.Tensor:
    """The tensor that `packed` was given."""
    name, shape, content = value
    dtype = getattr(torch, name)
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).reshape(shape)


def _packed_tree(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _packed_tree(each) for key, each in value.items()}
    return packed(value)


def _unpacked_tree(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unpacked_tree(each) for key, each in value.items()}
    return unpacked(value)
