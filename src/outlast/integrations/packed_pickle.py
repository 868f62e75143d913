"""Any Python object as a state dict: its tensors by number, and a pickle of everything else.

A `Checkpointer` saves nested dicts and lists with text or numbers for keys. What frameworks hand to
`torch.save` is more: tuples, ordered dicts, objects of their own classes. These keep their types,
and the tensors inside them are copied and written as tensors.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch

_REST = "pickle"
_TENSORS = "tensors"


def pack(value: Any) -> dict[str, Any]:
    """A state dict from which `unpack` makes an equal value. Its tensors are not copied."""
    content = io.BytesIO()
    pickler = _Pickler(content)
    pickler.dump(value)
    rest = torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)
    return {_REST: rest, _TENSORS: {str(i): tensor for i, tensor in enumerate(pickler.tensors)}}


def unpack(packed: Mapping[str, Any]) -> Any:
    """The value that was packed, with the tensors of `packed`."""
    content = io.BytesIO(packed[_REST].numpy().tobytes())
    return _Unpickler(content, packed.get(_TENSORS, {})).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=4)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # an id is unique only while its object lives

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value.detach())
            self._kept.append(value)
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._tensors[str(number)]
