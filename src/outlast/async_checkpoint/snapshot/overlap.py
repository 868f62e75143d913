"""Which tensors can be copied during training: those that only an optimizer changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from outlast.system.devices import on_accelerator

_WORTH_A_CALL = 64 << 10  # below that, a call costs more than the copy
_INSIDE = ("optimizer", "_optimizer", "optim", "base_optimizer")  # where wrappers keep theirs
_MAX_DEPTH = 8  # in case a wrapper refers to itself


def is_contiguous_cpu(tensor: torch.Tensor) -> bool:
    """Whether the tensor is contiguous in CPU memory, and large enough to be copied by itself."""
    return tensor.nbytes >= _WORTH_A_CALL and tensor.is_cpu and _has_bytes(tensor)


def _has_bytes(tensor: torch.Tensor) -> bool:
    # A subclass that wraps other tensors has neither memory nor an address.
    return tensor.is_contiguous() and tensor.data_ptr() != 0


class Writes:
    """The writes to tensors that torch has counted since this object was created."""

    def __init__(
        self, sources: Iterable[torch.Tensor], name_of: Callable[[torch.Tensor], str] = str
    ) -> None:
        self._name_of = name_of
        self._sources = list(sources)
        try:
            self._versions = [source._version for source in self._sources]
        except RuntimeError:
            # A tensor made in inference mode has no count, and cannot be written to outside of it.
            self._sources = [source for source in self._sources if not source.is_inference()]
            self._versions = [source._version for source in self._sources]

    def found(self) -> str:
        """Which tensors were written to, in words; empty if none was."""
        changed = [
            source
            for source, version in zip(self._sources, self._versions, strict=True)
            if source._version != version
        ]
        if not changed:
            return ""
        others = f" and {len(changed) - 1} more were" if changed[1:] else " was"
        return f"{self._name_of(changed[0])!r}{others} written to"


def can_overlap(tensor: torch.Tensor, owned: set[int]) -> bool:
    """Whether the tensor can be copied during training: only an optimizer changes it (its address
    is in `owned`), and it is contiguous, in the memory of the CPU or of the accelerator.
    """
    if not (tensor.is_cpu or on_accelerator(tensor)) or tensor.is_inference():
        return False
    return _has_bytes(tensor) and tensor.data_ptr() in owned


def addresses_of_optimizers(optimizers: Iterable[Optimizer]) -> set[int]:
    """The addresses of the tensors that only these optimizers change."""
    found: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found.update(_address(parameter) for parameter in group["params"])
        for state in optimizer.state.values():
            if isinstance(state, dict):
                found.update(_address(v) for v in state.values() if isinstance(v, torch.Tensor))
    return found


def _address(tensor: torch.Tensor) -> int:
    """The address of a tensor's bytes; for a DTensor, of this rank's part."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.data_ptr()


def optimizers_of(overlap: Any) -> tuple[list[Optimizer], list[str]]:
    """The optimizers that the argument `overlap` gives, without their wrappers; and the types of
    those whose `step` cannot be hooked, so that their tensors must be copied at once.

    torch calls the hook for each optimizer that was constructed as a `torch.optim.Optimizer`. A
    wrapper, such as that of accelerate, often is one by class only: the one inside has the hook. A
    `TypeError` if the argument is neither an optimizer, nor several, nor `False`. A `ValueError` if
    it is `True`.
    """
    if overlap is False:
        return [], []
    if overlap is True:
        raise ValueError(
            "overlap=True is for a Job, which has the optimizer: pass the optimizer itself to a "
            "Checkpointer, overlap=optimizer"
        )
    several = isinstance(overlap, Iterable) and not isinstance(overlap, str)
    hooked: list[Optimizer] = []
    others: list[str] = []
    for each in list(overlap) if several else [overlap]:
        if not callable(getattr(each, "step", None)):
            raise TypeError(f"overlap must be an optimizer, several, or False, not {each!r}")
        inside = _hooked_optimizer(each)
        if inside is None:
            others.append(type(each).__name__)
        else:
            hooked.append(inside)
    return hooked, others


def _hooked_optimizer(given: Any) -> Optimizer | None:
    """The outermost optimizer whose `step` calls torch's hooks."""
    current = given
    for _ in range(_MAX_DEPTH):
        if isinstance(current, Optimizer) and getattr(type(current).step, "hooked", False):
            return current
        current = next((v for v in (getattr(current, n, None) for n in _INSIDE) if v), None)
    return None
