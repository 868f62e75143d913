"""Which gradients a point lacks: those of a backward pass that a later step of the program may use.

Gradients belong to no point: a restored job begins its next step without any. That is right for a
gradient that was left over at the end of a step if an optimizer's step has used it, and nothing was
accumulated into it since; or if the program has discarded it since (`zero_grad()`).

The generator's backward pass leaves gradients in the discriminator. They are discarded in the next
step, or are the first part of an accumulation: only the next step shows which. So a gradient that
no step has used counts as needed until it is seen to be discarded: `grad` is `None` when the next
one is about to be accumulated, or at the end. One that was set to zero instead counts as needed.

A parameter that no optimizer has counts only in a step of the job without any step of an optimizer:
a program may update its parameters by hand.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from outlast.elastic.job.models import parameters_of
from outlast.elastic.tensors import versions


class _Used(NamedTuple):
    """What a step of an optimizer has used: of its parameters `keys`, those with a gradient."""

    keys: list[int]
    with_gradient: list[int]
    gradients: list[weakref.ref[torch.Tensor]]
    versions: list[Any]


class Gradients:
    """The gradients of these parameters, by name, and of those of `optimizers`. `left` are the
    parameters, by identity, whose gradients the last point lacks.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], optimizers: Iterable[Optimizer]
    ) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._all = {id(parameter): parameter for parameter in parameters.values()}
        self._optimized = {id(p): p for each in optimizers for p in parameters_of(each)}
        self._others = [p for key, p in self._optimized.items() if key not in self._all]
        self._used: dict[int, _Used] = {}  # by the optimizer; the last step comes last
        # Of an optimizer whose gradients the program has always discarded before a step was counted
        # (False), it is not noted what a step uses: if some are left, they count as needed once.
        self._kept: dict[int, bool] = {}
        self._hooks: dict[int, Any] = {}
        self.left: dict[int, torch.Tensor] = {}

    def used(self, optimizer: Optimizer) -> None:
        """An optimizer's step has ended."""
        parameters = list(parameters_of(optimizer))
        keys = list(map(id, parameters))
        before = self._used.pop(id(optimizer), None)
        if before is None or before.keys != keys:
            self._optimized |= {key: self._all[key] for key in keys if key in self._all}
        noted = parameters if self._kept.get(id(optimizer), True) else []
        found = {id(p): gradient for p in noted if (gradient := p.grad) is not None}
        gradients = list(found.values())
        references = list(map(weakref.ref, gradients))
        self._used[id(optimizer)] = _Used(keys, list(found), references, versions(gradients))

    def note(self, stepped: bool, present: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The parameters whose gradients may be needed after this step of the job, in which an
        optimizer has `stepped`. Those that are seen to be discarded are removed from it later.
        `present` are those of the given parameters that have a gradient.
        """
        may = self._optimized if stepped else self._all
        there = ((id(p), p.grad) for p in (*present, *self._others))
        found = {key: each for key, each in there if each is not None and key in may}
        for number, each in self._used.items():
            if not self._kept.get(number):
                self._kept[number] = bool(found) and not found.keys().isdisjoint(each.keys)
        used = self._still_used(found) if found else set()
        left = {key: may[key] for key in found if key not in used}
        for key, parameter in left.items():
            if key not in self._hooks and parameter.requires_grad and parameter.is_leaf:
                self._hooks[key] = self._hook(parameter)
        self.left = left
        return left

    def _still_used(self, found: Mapping[int, torch.Tensor]) -> set[int]:
        """Those of the gradients that a step has used, and to which nothing was added since."""
        counts = dict(zip(found, versions(list(found.values())), strict=True))
        return {
            key
            for each in self._used.values()
            for key, gradient, count in zip(*each[1:], strict=True)
            if counts.get(key) == count and gradient() is found[key]
        }

    def needed(self, left: Mapping[int, torch.Tensor]) -> str:
        """The name of a parameter among these whose gradient is still there; empty if none is."""
        names = (
            self._names.get(key, "a parameter") for key, p in left.items() if p.grad is not None
        )
        return next(names, "")

    def close(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks, self._used, self._all, self._optimized, self.left = {}, {}, {}, {}, {}
        self._others = []

    def _hook(self, parameter: torch.Tensor) -> Any:
        """Called before a gradient is accumulated."""
        # A restart may interrupt the removal: a parameter must not hold this object.
        key, itself = id(parameter), weakref.ref(self)

        def before(_: torch.Tensor) -> None:
            found = itself()
            if found is not None and key in found.left and found.left[key].grad is None:
                del found.left[key]

        return parameter.register_hook(before)
