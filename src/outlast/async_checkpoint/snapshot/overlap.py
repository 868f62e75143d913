"""Which tensors can be copied during training: those that only an optimizer changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from outlast.system.devices import on_accelerator

WORTH_A_CALL = 64 << 10  # below that, a call costs more than the copy
_INSIDE = ("optimizer", "_optimizer", "optim", "base_optimizer")  # where wrappers keep theirs
_MAX_DEPTH = 8  # in case a wrapper refers to itself


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


def can_overlap(tensor: torch.Tensor) -> bool:
    """Whether a tensor that only an optimizer changes can be copied during training: it is
    contiguous, in the memory of the CPU or of the accelerator.
    """
    in_reach = tensor.is_cpu or on_accelerator(tensor)
    return in_reach and not tensor.is_inference() and tensor.is_contiguous()


def addresses_of_optimizers(optimizers: Iterable[Optimizer]) -> set[int]:
    """The addresses of the tensors that only these optimizers change."""
    held: list[Any] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            held += group["params"]
        for state in optimizer.state.values():
            held += state.values() if isinstance(state, dict) else ()
    # Of a DTensor, that of this rank's part.
    local = (each.to_local() if isinstance(each, DTensor) else each for each in held)
    # A subclass that wraps other tensors, or a tensor without elements, has none.
    return {each.data_ptr() for each in local if isinstance(each, torch.Tensor)} - {0}


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
