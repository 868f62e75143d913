"""Ends the steps of a job, on one rank: the functions of each step, and then the stop that is
agreed, or the save that is due.

All ranks do the same in the same order, if they run the same program: whether a save is due is
decided in `job.step()`, whether to stop where the save would be: in a loop over `job.batches`,
where that comes back for the next batch. A loop that was left by `break` comes back nowhere: its
step is ended where the loop over `job.epochs` comes back, or with the next step, or with the last
save. A loop that fetches a batch ahead comes back in the middle of a step. If an optimizer has
stepped by then, the tensors belong to no step: the end is that of the next step, in `job.step()`.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import chain
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from outlast.async_checkpoint import SaveHandle
from outlast.async_checkpoint.finite import is_finite
from outlast.async_checkpoint.handle import LaterSave
from outlast.coordination.training_step import loop
from outlast.elastic.job.ending import Ending
from outlast.elastic.job.iteration import BACK, ENDED, OVER, STEPPED, Rest, rest_after
from outlast.elastic.job.models import parameters_of
from outlast.elastic.job.restoring import Restoring
from outlast.elastic.job.saves import Saves
from outlast.elastic.job.training_state import TrainingState
from outlast.elastic.stop_signals import StopSignals
from outlast.elastic.tensors import local
from outlast.system.arguments import as_int
from outlast.system.notices import notice

log = logging.getLogger("outlast.elastic")

T = TypeVar("T")
Function = Callable[[], object]


class IterationEnd:
    """Ends the steps of one job. `running` is the name of the function that runs, or empty."""

    def __init__(
        self,
        training: TrainingState,
        restoring: Restoring,
        saves: Saves,
        stop: StopSignals,
        ending: Ending,
        rank: int,
    ) -> None:
        self._training, self._restoring, self._saves = training, restoring, saves
        self._stop, self._ending = stop, ending
        self._iteration, self._epochs, self._rank = training.iteration, training.epochs, rank
        self._functions: list[tuple[int, Function]] = []
        self._due: list[Function] = []  # of the present step
        self.running = ""
        self._stepped_here = False  # the present step was made here, not restored
        self._loop: Any = None  # where it comes back if nothing was run since `job.step()`
        self._is_pending = self._save_is_due = False
        self._later: list[LaterSave] = []
        self._optimized: _Optimized | None = None
        self._is_partial = self._partial_said = False  # no optimizer has stepped in the step

    @property
    def _steps(self) -> int:
        return self._training.counters.steps

    def add(self, n: int, function: Function, *, is_restored: bool) -> None:
        n = as_int("n", n, at_least=1)
        if not callable(function):
            raise TypeError(f"function must be callable, not {function!r}")
        if is_restored:
            raise ValueError(
                f"job.after_steps({n}, {_name(function)}) after job.restore(), which runs again "
                "what had not ended: call it before"
            )
        self._functions.append((n, function))

    # ------------------------------------------------------------------------------- a step

    def check_step(self) -> None:
        """Before the step counts. A `ValueError` in a function of `after_steps`."""
        if self.running:
            is_part = "which job.after_steps() runs as a part of a step"
            raise ValueError(f"job.step() in {self.running}, {is_part}")
        self._training.check_modes(self._rank)

    def counted(self, frame: FrameType) -> None:
        """The step is counted; `frame` is that which has called `job.step()`."""
        self._due = self._due_now()
        self._stepped_here = True
        self._iteration.phase = STEPPED if self._due else ENDED
        self._iteration.place, self._loop = self._rest_after(frame, "job.step()")
        if self._optimized is not None:
            self._is_partial = self._epochs.in_batches and not self._optimized.stepped
            self._optimized.stepped = False

    def stepped(self) -> None:
        """The step is noted: runs its functions; ends it, outside of `job.batches`."""
        if self._due:
            self._run(self._due)
        self._save_is_due |= self._saves.is_due()
        was_pending, self._is_pending = self._is_pending, True
        self._watch_optimizers()
        if was_pending or not self._epochs.in_batches:
            self._end()

    def batches(self, found: Iterable[T]) -> Iterator[T]:
        """Yields these batches of `job.batches`; ends a step of this loop when it comes back."""
        for batch in found:
            before = self._steps
            yield batch
            if self._steps == before:  # another loop, which was left by `break`, may have made one
                continue
            caller = sys._getframe(1)
            self._came_back(BACK, is_changed=(caller.f_code, caller.f_lasti) != self._loop)
        if not self._epochs.in_evaluation:
            # The end of an epoch may put an average's weights into the model for an evaluation.
            self._saves.seal()

    def epochs(self, found: Iterable[int]) -> Iterator[int]:
        """Yields these epochs of `job.epochs`; ends the step of a batch loop that was left."""
        for epoch in chain(found, [None]):
            self._came_back(OVER)
            if self._later and not self._is_pending:  # else an optimizer is ahead of the step
                self._save_if_due()  # by hand, at the end of the epoch before
            if epoch is not None:
                yield epoch

    def _came_back(self, phase: int, *, is_changed: bool = True) -> None:
        if not self._is_pending or self._epochs.in_evaluation:
            return
        if self._optimized is not None and self._optimized.stepped:
            return
        self._iteration.phase = phase
        self._restoring.later(phase, is_changed=is_changed)
        self._end()

    def _end(self) -> None:
        self._is_pending = False
        self._stop.completed(self._steps, self.save_for_stop, self._restoring, self._save_for_move)
        self._save_if_due()

    def _save_if_due(self) -> None:
        if not self._save_is_due:
            return
        later, self._later, self._save_is_due = self._later, [], False
        self._say_gradients()
        with loop.saving() if later else nullcontext():
            handle = self._saves.save()
        for each in later:
            each.begun(handle)

    def _save_for_move(self) -> None:
        self._say_gradients()
        if not self._saves.is_saved():
            self._saves.save()

    def save_for_stop(self) -> None:
        self.say_rest()
        self._say_gradients()
        self._ending.save_for_stop()

    # --------------------------------------------------------------- restores, saves by hand

    def restored(self, *, save_is_due: bool) -> None:
        """The state is restored: runs the functions again that had not ended, and saves then."""
        self._watch_optimizers()
        self._is_pending, self._stepped_here, self._save_is_due = False, False, save_is_due
        self._later, self._due = [], self._due_now()
        if self._iteration.phase == STEPPED and self._due:
            names = ", ".join(map(_name, self._due))
            text, shown = "running %s again, which had not ended after step %d", self._rank == 0
            notice(log, text, names, self._steps, shown=shown)
            self._run(self._due)
            self._saves.changed()  # a checkpoint of this step lacks what they have done
        self._save_if_due()

    def say_rest(self) -> None:
        """Says which step's rest was not run, and where it stands."""
        if self._iteration.rest and self._rank == 0:
            log.warning(
                "what stands after %s was not run for step %d, or its effects are not in this "
                "state, and it is not repeated (job.after_steps() repeats what belongs to a step)",
                self._iteration.rest,
                self._steps,
            )

    def _say_gradients(self) -> None:
        """Says once that the save of a step in the middle of an accumulation lacks a part of it."""
        if not self._is_partial or self._partial_said or self._rank != 0:
            return
        optimizers = self._training.all_optimizers
        found = [p.grad for each in optimizers for p in parameters_of(each) if p.grad is not None]
        # A `GradScaler` skips a step with such gradients, on purpose.
        if found and all(is_finite(local(g)) for g in found if g.layout == torch.strided):
            self._partial_said = True
            log.warning(
                "no optimizer has stepped in step %d, which is saved, and gradients are left: they "
                "are in no checkpoint. If they are accumulated, a job that continues there loses "
                "them, and ends with other weights: call job.step() once for each step of the "
                "optimizer",
                self._steps,
            )

    def save(self, metric: float | None, frame: FrameType) -> SaveHandle:
        """A save by hand, called in `frame`; see `Job.save`. The end of an epoch would be run again
        on a state that has parts of it already. A `ValueError` in the midst of a step: what the
        optimizer has done would be done again after a restore.
        """
        is_later = self.running or self._epochs.at_end
        if not is_later and self._optimized is not None and self._optimized.stepped:
            raise ValueError(
                f"job.save() between optimizer.step() and job.step(), after step {self._steps}: a "
                "job that continues there would make the next step twice. Call it after job.step()"
            )
        self._saves.set_metric(metric)
        if is_later:
            self._save_is_due = True
            self._later.append(LaterSave(self._steps))
            return self._later[-1]
        before = self._iteration.place
        if self._stepped_here and self._iteration.phase < BACK:
            self._iteration.place = self._rest_after(frame, "job.save()").place
        try:
            with loop.saving():
                return self._saves.save()
        finally:
            self._iteration.place = before

    def leave(self) -> None:
        """The program has left the loop without an error: the last save has all that it did."""
        if self._stepped_here:
            self._iteration.phase = OVER
        self._epochs.finish()
        self._is_pending, self._save_is_due = False, bool(self._later)
        self._save_if_due()

    def _watch_optimizers(self) -> None:
        """From here on, a step of an optimizer belongs to the next step."""
        if self._optimized is None:
            self._optimized = _Optimized(self._training)
        self._optimized.stepped = False

    def close(self) -> None:
        if self._optimized is not None:
            self._optimized.hook.remove()
            self._optimized = None

    def _due_now(self) -> list[Function]:
        return [function for n, function in self._functions if self._steps % n == 0]

    def _run(self, functions: Iterable[Function]) -> None:
        self._epochs.in_function = True
        try:
            for function in functions:
                self.running = _name(function)
                function()
        except Exception as e:
            if hasattr(e, "add_note"):  # Python 3.11
                e.add_note(f"in {self.running}, which job.after_steps() runs in step {self._steps}")
            raise
        finally:
            self._epochs.in_function, self.running = False, ""
            self._watch_optimizers()  # a step of one in there is a part of this step
        self._iteration.phase = ENDED
        self._restoring.later(ENDED)

    def _rest_after(self, frame: FrameType, call: str) -> Rest:
        """A framework does what follows a step by itself."""
        return Rest() if self._epochs.by_framework else rest_after(frame, call)


class _Optimized:
    """Whether an optimizer has stepped; refers to no tensor, since torch keeps the hook."""

    def __init__(self, training: TrainingState) -> None:
        self.stepped = False
        optimizers = training.all_optimizers
        self._parameters = {id(p) for each in optimizers for p in parameters_of(each)}
        self.hook = register_optimizer_step_post_hook(self._after)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        groups = optimizer.param_groups
        if any(id(p) in self._parameters for group in groups for p in group["params"][:1]):
            self.stepped = True


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return str(name.rpartition("<locals>.")[2])
