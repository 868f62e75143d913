"""What is noted after a step: copies of small values, and marks that find writes to tensors.

torch counts most writes to a tensor, but not those through `parameter.data`, by which programs swap
in averages of the weights for a validation. A fault in between must not make them the state of the
step before. A digest of all contents would take too long after every step, so a few elements of
each parameter are compared: a swap changes nearly all of them.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import operator
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.async_checkpoint.subclasses import parts, wraps
from outlast.elastic.tensors import Digests, Versions, versions
from outlast.system.shared_memory import memory_at

_ELEMENTS = 16  # of each parameter
# A larger tensor outside the model and the optimizer, for example in an average of the weights, is
# not copied after every step: instead, its writes are counted.
_COPIED_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True)
class Marks:
    """The state of the tensors of a model and its optimizer: different after a write."""

    versions: list[Any]  # how often each parameter was written to
    places: list[int]  # where the parameters are in memory
    sample: list[bytes]  # some of their elements
    moments: tuple[list[int], list[int]]  # the optimizer's tensors, and the writes to each
    # Those of all contents, if they decide: after a restore, DDP may write equal values to the
    # parameters, and accelerate moves them and the optimizer's tensors.
    digests: Digests | None = None
    # Some elements of those on an accelerator, copied there in the order of its queue.
    queued: tuple[torch.Tensor, ...] = dataclasses.field(default=(), compare=False)


class Writes:
    """Finds writes to these parameters; to optimizers' tensors, those that torch counts."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._parameters, self._optimizers = parameters, optimizers
        self._sampled = [each for each in parameters if each.layout == torch.strided]
        self._wrapped = any(map(wraps, parameters))
        self._places: list[int] = []
        self._samples: list[_Sample] = []
        self._on_devices: list[list[torch.Tensor]] = []
        self._moments = _Moments([])
        self.with_gradient: Sequence[nn.Parameter] = ()  # at the last `marks`

    def marks(self) -> Marks:
        places = list(map(torch.Tensor.data_ptr, self._to_sample()))
        self.with_gradient = [each for each in self._parameters if each.grad is not None]
        counts = versions(self._parameters)
        if places != self._places:
            self._places = []  # what follows may be interrupted
            views = [view for t in self._to_sample() for view in _view_of_some(t.detach())]
            self._samples = _samples([view for view in views if view.device.type == "cpu"])
            alike: dict[Any, list[torch.Tensor]] = {}  # those that one `cat` can copy
            for view in views:
                if view.device.type != "cpu":
                    alike.setdefault((view.device, view.shape[1]), []).append(view)
            self._on_devices = list(alike.values())
            self._places = places
        return Marks(
            counts,
            places,
            [sample.bytes() for sample in self._samples],
            self._present_moments(),
            queued=tuple(torch.cat(views) for views in self._on_devices),
        )

    def marks_with_digests(self) -> Marks:
        """The present marks, of which the contents decide."""
        return dataclasses.replace(self.marks(), digests=Digests(self._tensors()))

    def counted_since(self, marks: Marks) -> bool:
        """Whether torch has counted a write to a parameter, or to an optimizer's tensor."""
        now = versions(self._parameters), self._present_moments()
        return now != (marks.versions, marks.moments)

    def since(self, marks: Marks) -> bool:
        now = dataclasses.replace(self.marks(), digests=marks.digests)
        if now == marks and all(map(torch.equal, now.queued, marks.queued)):
            return False
        return marks.digests is None or not marks.digests.same_as(self._tensors())

    def _to_sample(self) -> list[torch.Tensor]:
        found = [t._local_tensor if isinstance(t, DTensor) else t for t in self._sampled]
        return [part for each in found for _, part in parts(each)] if self._wrapped else found

    def _present_moments(self) -> tuple[list[int], list[Any]]:
        """The identities of the optimizers' tensors, and how often they were written to."""
        states = [state for each in self._optimizers for state in each.state.values()]
        values = [value for state in states for value in state.values()]
        if not self._moments.has(values):
            self._moments = _Moments(values)
        return self._moments.ids, versions(self._moments.tensors)

    def _tensors(self) -> list[torch.Tensor]:
        self._present_moments()
        return [*self._parameters, *self._moments.tensors]


class _Moments:
    """The `values` of the states of optimizers, and the tensors among them."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values
        self.tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self.ids = list(map(id, self.tensors))

    def has(self, values: list[Any]) -> bool:
        """Whether these are the same objects."""
        return len(values) == len(self._values) and all(map(operator.is_, values, self._values))


def _view_of_some(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """A view of the bytes of some elements; none if the elements do not lie together in memory."""
    is_there = tensor.numel() and tensor.untyped_storage().nbytes()  # an offloaded one is not
    if tensor.is_conj() or tensor.is_neg() or not is_there:
        return []
    dense = tensor
    if not dense.is_contiguous():
        dense = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
    if not dense.is_contiguous():
        return []
    content = dense.view(-1).view(torch.uint8).view(tensor.numel(), -1)
    return [content[:: max(1, tensor.numel() // _ELEMENTS)][:_ELEMENTS]]


class _Sample:
    """Some elements of one size, wherever they are: read together, as thousands of reads, one for
    each tensor, would take longer than all the rest. Their tensors must still be in place.
    """

    def __init__(self, addresses: Sequence[int], size_bytes: int) -> None:
        # Of the memory in between, nothing is read.
        first, last = min(addresses), max(addresses)
        memory = memory_at(first, last - first + size_bytes)  # see `memory_of`
        self._memory = np.frombuffer(memory, f"u{size_bytes}")
        self._where = (np.array(addresses, np.intp) - first) // size_bytes

    def bytes(self) -> bytes:
        return self._memory[self._where].tobytes()


def _samples(views: Iterable[torch.Tensor]) -> list[_Sample]:
    """Of the elements in these views of bytes."""
    addresses: dict[int, list[int]] = {}
    for view in views:
        at, (count, size), step = view.data_ptr(), view.shape, view.stride(0)
        width = next(w for w in (8, 4, 2, 1) if size % w == at % w == step % w == 0)
        found = addresses.setdefault(width, [])
        for first in range(at, at + count * step, step) if count > 1 else [at]:
            found += range(first, first + size, width)
    return [_Sample(found, width) for width, found in addresses.items()]


class Snapshot:
    """The value of a nested state at this moment; `watched` are its large tensors.

    A history of 10,000 entries must not cost a walk in Python at every step: the state is pickled,
    at the speed of C, and read again only if it is needed. Small tensors are cloned, large ones are
    referred to.
    """

    def __init__(self, state: Any) -> None:
        self.watched = Versions()
        content = io.BytesIO()
        pickler = _Pickler(content, self.watched)
        self._tensors, self._pickled, self._copied = pickler.tensors, b"", None
        try:
            pickler.dump(state)
        except Exception:  # noqa: BLE001 - some class cannot be pickled, for a reason of its own
            self.watched, self._copied = Versions(), copy.deepcopy(state)
        else:
            self._pickled = content.getvalue()

    def same_as(self, other: Snapshot) -> bool:
        """Whether the other one is known to have the same value, now."""
        if not self._pickled or self._pickled != other._pickled or other.watched.changed:
            return False
        pairs = zip(self._tensors, other._tensors, strict=True)
        return all(
            a is b  # its writes are counted, too
            if wraps(a)
            else a.data_ptr() == b.data_ptr()  # a large one, whose writes are counted
            or ((a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b))
            for a, b in pairs
        )

    def read(self) -> Any:
        if not self._pickled:
            return self._copied
        return _Unpickler(io.BytesIO(self._pickled), self._tensors).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, watched: Versions) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._watched = watched
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, value: Any) -> Any:
        """Called for what is not a plain value or container."""
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if not isinstance(value, DTensor) and not wraps(value) and value.nbytes <= _COPIED_BYTES:
            self.tensors.append(value.detach().clone())
        else:
            self._watched.add(value)
            self.tensors.append(value if wraps(value) else value.detach())
        return _tensor, (len(self.tensors) - 1,)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _tensor.__name__):
            return self._tensors.__getitem__
        return super().find_class(module, name)


def _tensor(number: int) -> torch.Tensor:
    """Stands for a tensor in the pickled state."""
    raise NotImplementedError(f"tensor {number} is read by _Unpickler")
