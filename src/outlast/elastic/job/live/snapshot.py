"""Copies the states of a job's attached objects after each step, quickly.

A history of 10,000 entries must not cost a walk in Python at every step. So a state is pickled,
which torch's and Python's containers and numbers do at the speed of C, and read again only if it is
needed, in the process that has written it. Tensors are left out: small ones are cloned, large ones
are referred to and watched.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from outlast.elastic.job.live.point import Versions, by_value, held


class Snapshot:
    """The value of `state` at this moment; large tensors are added to `watched`."""

    def __init__(self, state: Any, watched: Versions) -> None:
        content = io.BytesIO()
        pickler = _Pickler(content, watched)
        self._copied: Any = None
        self._pickled: bytes | None = None
        try:
            pickler.dump(state)
        except Exception:  # noqa: BLE001 - some class cannot be pickled, for a reason of its own
            self._copied = by_value(state, watched)
        else:
            self._pickled, self._tensors = content.getvalue(), pickler.tensors

    def read(self) -> Any:
        """The value."""
        if self._pickled is None:
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
        self.tensors.append(held(value, self._watched))
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
