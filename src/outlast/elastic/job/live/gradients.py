"""Which gradients a point lacks: those of a backward pass that a later step of the program may use.

Gradients belong to no point: a restored job begins its next step without any. That is right for a
gradient that was left over at the end of a step if

    an optimizer's step has used it         and nothing was accumulated into it since
    or the program has discarded it since   `zero_grad()`

Which of several optimizers has stepped matters: the generator's backward pass leaves gradients in
the discriminator after the step of its optimizer. They are discarded in the next step, or they are
the first part of an accumulation over several steps: only the next step shows which. So a gradient
that is left over, and that no step has used, counts as needed until it is seen to be discarded:
`grad` is `None` when the next gradient is about to be accumulated, or at the end. A gradient that
was set to zero instead (`set_to_none=False`) counts as needed.

An optimizer's step uses the gradients of its own parameters. A parameter that no optimizer has,
such as one of a layer that is not fine-tuned, counts only in a step of the job without any step of
an optimizer: a program may update its parameters by hand.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from outlast.elastic.job.live.writes import version
from outlast.elastic.job.models import parameters_of


class Gradients:
    """The gradients of these parameters, by name, and of those of `optimizers`.

    Attributes:
        left: the parameters, by identity, whose gradients the last point lacks.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], optimizers: Iterable[Optimizer]
    ) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._all = {id(parameter): parameter for parameter in parameters.values()}
        self._optimized = {id(p): p for each in optimizers for p in parameters_of(each)}
        self._used: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self._hooks: dict[int, Any] = {}
        self.left: dict[int, torch.Tensor] = {}

    def used(self, optimizer: Optimizer) -> None:
        """An optimizer's step has ended."""
        for parameter in parameters_of(optimizer):
            key, gradient = id(parameter), parameter.grad
            if key in self._all:
                self._optimized[key] = parameter
            if gradient is not None and key in self._optimized:
                self._used[key] = weakref.ref(gradient), version(gradient)

    def note(self, stepped: bool) -> dict[int, torch.Tensor]:
        """The parameters whose gradients may be needed after this step of the job, in which an
        optimizer has `stepped`. Those that are seen to be discarded are removed from it later.
        """
        left: dict[int, torch.Tensor] = {}
        for key, parameter in (self._optimized if stepped else self._all).items():
            gradient = parameter.grad
            if gradient is None:
                continue
            used = self._used.get(key)
            if used is None or used[0]() is not gradient or used[1] != version(gradient):
                left[key] = parameter
        for key, parameter in left.items():
            if key not in self._hooks and parameter.requires_grad and parameter.is_leaf:
                self._hooks[key] = self._hook(parameter)
        self.left = left
        return left

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

    def _hook(self, parameter: torch.Tensor) -> Any:
        """Called before a gradient is accumulated."""
        # A restart may interrupt the removal: a parameter must not hold this object.
        key, itself = id(parameter), weakref.ref(self)

        def before(_: torch.Tensor) -> None:
            found = itself()
            if found is not None and key in found.left and found.left[key].grad is None:
                del found.left[key]

        return parameter.register_hook(before)
