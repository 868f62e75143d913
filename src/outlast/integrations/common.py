"""What several adapters need: errors, states of random generators, pickles with tensors."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from outlast.elastic import random_generators

_RANDOM = "random"
OPTIONAL = (f"{_RANDOM}.",)
"""A restore passes this: a rank that is new has no random generators in a checkpoint."""


def not_importable(framework: str, extra: str, cause: ImportError) -> ImportError:
    """The error of an adapter whose framework is not installed, or lacks something: another
    version, or one of its own requirements. Says which extra to install.
    """
    what = f"needs the package {framework}, which is not installed"
    if not isinstance(cause, ModuleNotFoundError) or cause.name != framework:
        what = f"cannot import the package {framework} as it is installed ({cause})"
    return ImportError(
        f"outlast.integrations.{framework} {what}: pip install 'outlast[{extra}]'", name=framework
    )


def check_all_ranks(num_processes: int, on_cpus: str) -> None:
    """Checks that accelerate trains with all ranks of the process group, and not each alone: else a
    `ValueError`. Without a GPU it ignores the others, unless the argument `on_cpus` is given.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_processes < ranks:
        raise ValueError(
            f"accelerate uses {num_processes} of {ranks} ranks: each rank would train alone. "
            f"On CPUs, pass {on_cpus}"
        )


def with_generators(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The state with those of the random generators of this rank."""
    return {**state, _RANDOM: {str(rank): random_generators.capture()}}


def set_generators(state: Mapping[str, Any], rank: int) -> None:
    """Sets the random generators to those of a state of `with_generators`."""
    random_generators.set_all(state[_RANDOM][str(rank)])


def pack(value: Any) -> dict[str, Any]:
    """Any Python object as a state dict, from which `unpack` makes an equal one: its tensors by
    number, and a pickle of everything else.

    A `Checkpointer` saves nested dicts and lists with text or numbers for keys. What frameworks
    pass to `torch.save` is more: tuples, ordered dicts, objects of their own classes. These keep
    their types, and the tensors inside them are copied and written as tensors.
    """
    content = io.BytesIO()
    pickler = _Pickler(content)
    pickler.dump(value)
    rest = torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)
    return {"pickle": rest, "tensors": {str(i): each for i, each in enumerate(pickler.tensors)}}


def unpack(packed: Mapping[str, Any]) -> Any:
    """The value that was packed, with the tensors of `packed`."""
    content = io.BytesIO(packed["pickle"].numpy().tobytes())
    return _Unpickler(content, packed.get("tensors", {})).load()


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
