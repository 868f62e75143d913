"""What is noted after a step: copies of small values, and marks that find writes to tensors.

torch counts most writes to a tensor. Programs also write to parameters in ways that leave the
counters as they are: averages of the weights that are swapped in for a validation, by
`parameter.data.copy_(...)` or `parameter.data = ...`, and updates by hand. A fault in between must
not make them the state of the step before. A digest of all contents would take too long after every
step, so a few elements of each parameter are compared: a swap changes nearly all of them. A write
to few elements may remain unnoticed.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import operator
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.elastic.job.encoding import digest

_ELEMENTS = 16  # of each parameter
_PLAIN = frozenset({torch.Tensor, nn.Parameter})
_count, _values = operator.attrgetter("_version"), operator.methodcaller("values")
# A larger tensor outside the model and the optimizer, for example in an average of the weights, is
# not copied after every step: instead, its writes are counted.
_COPIED_BYTES = 64 << 10


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


@dataclasses.dataclass(frozen=True)
class Marks:
    """The state of the tensors of a model and its optimizer: different after a write.

    Attributes:
        versions: how often each parameter was written to.
        places: where the parameters are in memory.
        sample: some of their elements.
        queued: some elements of those on an accelerator, copied there in the order of its queue.
        moments: which tensors the optimizer has, and how often each was written to.
        digests: those of all contents, if they decide: after a restore, the ranks may still write
            equal values to their parameters, as `DistributedDataParallel` does, or move them and
            the optimizer's tensors, as accelerate does.
    """

    versions: list[Any]
    places: list[int]
    sample: list[bytes]
    moments: tuple[list[int], list[int]]
    digests: list[str] | None = None
    queued: tuple[torch.Tensor, ...] = dataclasses.field(default=(), compare=False)


class Writes:
    """Finds writes to these parameters and to the tensors of these optimizers. A write to one of
    the latter that torch does not count is not found.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._parameters, self._optimizers = parameters, optimizers
        self._sampled = [each for each in parameters if each.layout == torch.strided]
        self._sharded = any(isinstance(each, DTensor) for each in parameters)
        self._places: list[int] = []
        self._views: list[Any] = []
        self._on_devices: list[list[torch.Tensor]] = []

    def marks(self) -> Marks:
        tensors: Sequence[torch.Tensor] = self._sampled
        if self._sharded:
            tensors = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
        places = list(map(torch.Tensor.data_ptr, tensors))
        if places != self._places:
            views = [view for each in tensors for view in _view_of_some(each.detach())]
            self._views = [view.numpy() for view in views if view.device.type == "cpu"]
            alike: dict[Any, list[torch.Tensor]] = {}  # those that one `cat` can copy
            for view in views:
                if view.device.type != "cpu":
                    alike.setdefault((view.device, view.shape[1]), []).append(view)
            self._on_devices = list(alike.values())
            self._places = places
        moments = self._present_moments()
        return Marks(
            versions(self._parameters),
            places,
            [view.tobytes() for view in self._views],
            (list(map(id, moments)), versions(moments)),
            queued=tuple(torch.cat(views) for views in self._on_devices),
        )

    def marks_with_digests(self) -> Marks:
        """The present marks, of which the contents decide."""
        return dataclasses.replace(self.marks(), digests=self._digests())

    def since(self, marks: Marks) -> bool:
        now = dataclasses.replace(self.marks(), digests=marks.digests)
        if now == marks and all(map(torch.equal, now.queued, marks.queued)):
            return False
        return marks.digests is None or marks.digests != self._digests()

    def _present_moments(self) -> list[torch.Tensor]:
        states = itertools.chain.from_iterable(each.state.values() for each in self._optimizers)
        values = itertools.chain.from_iterable(map(_values, states))
        return [value for value in values if isinstance(value, torch.Tensor)]

    def _digests(self) -> list[str]:
        return [digest(each) for each in (*self._parameters, *self._present_moments())]


def _view_of_some(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """A view of the bytes of some elements; none if the elements do not lie together in memory."""
    if tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return []
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    dense = tensor.permute(order)
    if not dense.is_contiguous():
        return []
    content = dense.view(-1).view(torch.uint8).view(tensor.numel(), -1)
    return [content[:: max(1, tensor.numel() // _ELEMENTS)][:_ELEMENTS]]


class Snapshot:
    """The value of a nested state at this moment.

    A history of 10,000 entries must not cost a walk in Python at every step. So the state is
    pickled, which torch's and Python's containers and numbers do at the speed of C, and read again
    only if it is needed, in this process. Tensors are left out: small ones are cloned, large ones
    are referred to.

    Attributes:
        watched: the large tensors.
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
        if not isinstance(value, DTensor) and value.nbytes <= _COPIED_BYTES:
            self.tensors.append(value.detach().clone())
        else:
            self._watched.add(value)
            self.tensors.append(value.detach())
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


def versions(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """`version` of each tensor: of thousands, after each step."""
    if _PLAIN.issuperset(map(type, tensors)):
        try:
            return list(map(_count, tensors))
        except RuntimeError:  # one was made in inference mode
            pass
    return [version(tensor) for tensor in tensors]


def version(tensor: torch.Tensor) -> Any:
    """How many writes to the tensor torch has counted."""
    if isinstance(tensor, DTensor):  # torch counts on the one or on the other
        return tensor._version, tensor._local_tensor._version
    return 0 if tensor.is_inference() else tensor._version
