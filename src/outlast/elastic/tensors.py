"""Tensors in the memory of this rank: their bytes and digests, their shards, the writes to them."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy  # noqa: F401 - torch installs without it, and says so only at the first tensor's bytes
import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from outlast.async_checkpoint.state_dict import look_up, torch_path, wrappers
from outlast.async_checkpoint.subclasses import SUBCLASS, check_same, inner, parts, wraps
from outlast.system.shared_memory import memory_at

_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_COLUMNS = 1021  # a prime: rows that change places, of any usual width, change the sums
_FACTOR = 0x1000193  # odd, so that no bit of an earlier sum is lost
_count = operator.attrgetter("_version")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its gradient; of a DTensor, the part of this rank."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a local tensor: a view, or a copy if it is not contiguous, or a conjugate."""
    resolved = local(tensor).resolve_conj().resolve_neg()
    return resolved.contiguous().flatten().view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in CPU memory, which the caller keeps. Not by `numpy()`:
    torch lets nobody resize a storage that NumPy has seen, as observers of quantization do.
    """
    return memory_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else memoryview(b"")


def digest(tensor: torch.Tensor, *, as_on_host: bool = False) -> str:
    """Of the local tensor's contents; on an accelerator, of their sums: these alone are copied to
    the host, unless the digest is to be that of a tensor there.
    """
    found = xxhash.xxh3_64()
    for each in [tensor] if type(tensor) in _PLAIN else [part for _, part in parts(tensor)]:
        content = each if _is_in_order(each) else bytes_of(each)
        if content.device.type != "cpu":
            content = (content if as_on_host else column_sums(content)).cpu()
        found.update(memory_of(content))
    return found.hexdigest()


def _is_in_order(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor are those of its memory, from the first to the last."""
    is_plain = type(tensor) in _PLAIN and tensor.device.type == "cpu"
    is_dense = is_plain and tensor.layout is torch.strided and tensor.is_contiguous()
    return is_dense and not (tensor.is_conj() or tensor.is_neg())


def column_sums(content: torch.Tensor) -> torch.Tensor:
    """The sums of the columns of these bytes as a table of 32-bit integers: on their device, in the
    order of its queue.
    """
    if content.storage_offset() % 4:
        content = content.clone()
    width = 4 * _COLUMNS
    whole = content.numel() // width * width
    rest = nn.functional.pad(content[whole:], (0, width - (content.numel() - whole)))
    total = rest.view(torch.int32).to(torch.int64)
    if whole:
        table = content[:whole].view(torch.int32).view(-1, _COLUMNS)
        total = total + table.sum(0, dtype=torch.int64)
    return total


class Digests:
    """Of the contents of several tensors. Those on an accelerator are summed there, in the order of
    its queue: to copy them to the host would take seconds. `like` are digests to compare with: the
    same way of each tensor, wherever it is now.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], like: Digests | None = None) -> None:
        devices = [each.device for each in tensors] if like is None else like._devices
        self._devices: list[torch.device] = devices
        self._hashes: list[str] = []
        self._sums: dict[torch.device, torch.Tensor] = {}
        for tensor, device in zip(tensors, self._devices, strict=True):
            if device.type == "cpu":
                self._hashes.append(digest(tensor, as_on_host=True))
                continue
            for _, part in parts(tensor):
                sums, before = column_sums(bytes_of(part)).to(device), self._sums.get(device)
                # The order of the tensors counts, too.
                self._sums[device] = sums if before is None else sums.add_(before, alpha=_FACTOR)

    def same_as(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors have these contents now."""
        if len(tensors) != len(self._devices):
            return False
        now = Digests(tensors, self)
        same = (torch.equal(each, now._sums[device]) for device, each in self._sums.items())
        return self._hashes == now._hashes and all(same)


def shard_of(tensor: torch.Tensor) -> str | None:
    """Which shard this rank holds: equal on ranks that hold the same; `None` if it holds none."""
    if not isinstance(tensor, DTensor):
        return ""
    mesh, at = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if at is None:
        return None
    places = [
        f"{placement} {at[dim]}/{mesh.size(dim)}"
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    ]
    return ",".join(places) or "-"


def rewrap(loaded: Any, present: Callable[[], Any], where: str) -> None:
    """Fills the subclasses that wrap tensors from the dicts that a `loaded` state has in their
    places, and puts them there; `where` is its name. They are in `present()`, called if needed.
    A `CheckpointMismatch` if another tensor is there now, or none; names it.
    """
    found = wrappers(loaded)
    state = present() if found else None
    for path, saved in found:
        try:
            tensor = look_up(state, path)
        except (LookupError, TypeError, AttributeError):
            tensor = None
        now = inner(tensor) if wraps(tensor) else {SUBCLASS: f"a {type(tensor).__name__}"}
        name = ".".join([where, *map(str, torch_path(path))])
        check_same(name, saved[SUBCLASS], now[SUBCLASS])
        with torch.no_grad():
            for key, each in saved.items():
                if isinstance(into := now[key], torch.Tensor) and isinstance(each, torch.Tensor):
                    into.copy_(each)
        parent, key = look_up(loaded, path[:-1]), path[-1]
        if not isinstance(parent, torch.Tensor):  # which is in place
            parent[key[0] if isinstance(key, tuple) else key] = tensor


class Versions:
    """Which tensors were written to since they were added, as far as torch has counted."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._tensors = list(tensors)
        self._counts = versions(self._tensors)

    def add(self, tensor: torch.Tensor) -> None:
        self._tensors.append(tensor)
        self._counts.append(version(tensor))

    @property
    def changed(self) -> bool:
        return versions(self._tensors) != self._counts


def versions(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """`version` of each tensor: of thousands, after each step."""
    if _PLAIN.issuperset(map(type, tensors)):
        with contextlib.suppress(RuntimeError):  # one was made in inference mode
            return list(map(_count, tensors))
    return [version(tensor) for tensor in tensors]


def version(tensor: torch.Tensor) -> Any:
    """How many writes to the tensor torch has counted."""
    if isinstance(tensor, DTensor):  # torch counts on the one or on the other
        return tensor._version, tensor._local_tensor._version
    if wraps(tensor):  # likewise
        return tensor._version, [version(each) for _, each in parts(tensor)]
    return 0 if tensor.is_inference() else tensor._version


class Backup:
    """A CPU copy of a nested state, without `not_copied`: the parts to which no load writes."""

    def __init__(self, state: Any, not_copied: Sequence[Any]) -> None:
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []

        def is_kept(value: Any) -> bool:
            return any(value is each for each in not_copied)

        def copied(value: Any) -> Any:
            if is_kept(value):
                return value
            if not isinstance(value, torch.Tensor):
                return copy.deepcopy(value)
            for _, each in parts(value):
                tensor = _each_once(local(each))
                self._tensors.append((tensor, tensor.to("cpu", copy=True)))
            return value

        self._state = tree_map(copied, state, is_leaf=is_kept)

    def roll_back(self) -> Any:
        """Writes the copied contents back into the tensors; returns the state as it was."""
        with torch.no_grad():
            for tensor, contents in self._tensors:
                tensor.copy_(contents)
        return self._state


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """The part with every element in memory once: torch does not write to an expanded tensor."""
    if tensor.layout is torch.strided:
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.size(dim) > 1:
                tensor = tensor.narrow(dim, 0, 1)
    return tensor
