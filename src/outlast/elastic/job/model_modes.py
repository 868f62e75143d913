"""What a program sets on a model beside its tensors: which parameters are trained, and the mode of
each module (`train`, `eval`). A function that begins again sets both anew, unless it does so once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from outlast.elastic.job.parts import Part
from outlast.elastic.wrapped_modules import plain_name
from outlast.inprocess.running_call import RunningCall

log = logging.getLogger("outlast.elastic")

_NAMES = "parameters"  # part of the checkpoint's format


class ModelModes(Part):
    """The names of the parameters that are not trained, or of those that are, if they are fewer, as
    with adapters. They are compared at the end of the first step after a restore, not set: a
    wrapper such as DDP asks for them only when it is made.
    """

    in_place = False
    _expected: tuple[str, ...] | None = None

    def save(self) -> dict[str, tuple[str, ...]]:
        frozen, trained = self._names(False), self._names(True)
        found = ("trained", *trained) if len(trained) < len(frozen) else ("frozen", *frozen)
        return {_NAMES: found}

    def _names(self, trained: bool) -> list[str]:
        named = self._source.named_parameters()
        return [plain_name(name) for name, each in named if each.requires_grad == trained]

    def shared(self) -> Any:
        return {}  # what counts is known when the iteration has ended

    def frozen(self, shared: Any) -> Any:
        return self.save()

    def load(self, state: Mapping[str, Any], steps: int) -> None:
        self._expected = state[_NAMES] if steps and state else None

    def check(self, rank: int, steps: int) -> None:
        """Call it at the end of each step. Warns of a parameter that was trained before a restore,
        and is not now: the function has unfrozen it in a step that is not made again.
        """
        expected, self._expected = self._expected, None
        if expected is None or rank != 0:
            return
        known = set(expected[1:])
        names = [n for n in self._names(False) if (n in known) == (expected[0] == "trained")]
        if names:
            log.warning(
                "%d parameters were trained in the state that this job continued from, and are not "
                "in step %d: %s%s. What unfreezes a parameter once has to run again before the "
                "model is wrapped",
                *(len(names), steps, ", ".join(names[:3]), ", ..." * (len(names) > 3)),
            )


def restore_modes(module: nn.Module, call: RunningCall) -> None:
    """Gives each module of a model that outlives a restart in place the mode of its first restore:
    a fault in an evaluation leaves that of the evaluation.
    """
    for each in module.modules():
        each.training = call.modes.setdefault(each, each.training)
