"""The argument `overlap`: the optimizers whose tensors can be copied during training.

The copy must end before an optimizer changes its tensors, so a torch hook runs before its `step`.
torch calls the hook for each optimizer that was constructed as a `torch.optim.Optimizer`. A
wrapper, such as that of accelerate, often is one by class only: the one inside has the hook.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

_INSIDE = ("optimizer", "_optimizer", "optim", "base_optimizer")  # where wrappers keep theirs
_MAX_DEPTH = 8  # in case a wrapper refers to itself


def optimizers_of(overlap: Any) -> tuple[list[Optimizer], list[str]]:
    """The optimizers that the argument gives, without their wrappers; and the types of those whose
    `step` cannot be hooked, so that their tensors must be copied at once.

    Raises:
        TypeError: if the argument is neither an optimizer, nor several, nor `False`.
        ValueError: if it is `True`.
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
