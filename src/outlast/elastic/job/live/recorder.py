"""Notes the live point of this rank after each step, and marks the steps of optimizers.

Why a point is what it says: after `completed`, three things may change the tensors of the model and
the optimizer. An optimizer's step is announced by torch's hook before its first write. Another
write is counted by torch, and found when the point is frozen. A write to a parameter that torch
does not count is found if it changes one of the elements that are compared (`writes`).

An optimizer's step with a closure begins when that has returned for the first time: until then the
optimizer has only asked for gradients (Lightning runs the whole forward and backward pass in
there). If an optimizer writes before it calls the closure, as for sharpness-aware minimization,
these are other writes.

With several optimizers, a step begins with the first write of the first one, and has one early note
for each backward pass: the last one counts. A restart in place may interrupt `completed` at any
moment: a point is complete before the one assignment that makes it the present one.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from outlast.async_checkpoint.subclasses import wraps
from outlast.coordination.call_ledger import CallLedger
from outlast.elastic.job.epochs import place_of
from outlast.elastic.job.live.frozen import Frozen, Point, signature
from outlast.elastic.job.live.gradients import Gradients
from outlast.elastic.job.live.meeting import Meeting
from outlast.elastic.job.live.own_state import Buffers, MakeMirror, Record, Slots, read
from outlast.elastic.job.live.queued import Queued
from outlast.elastic.job.live.writes import Snapshot, Writes
from outlast.elastic.job.models import parameters_of
from outlast.elastic.job.parts import Saver
from outlast.elastic.job.training_state import TrainingState
from outlast.elastic.wrapped_modules import plain_state_dict
from outlast.inprocess.nccl import aborted_by_torch
from outlast.system.devices import on_accelerator
from outlast.system.error_text import describe
from outlast.system.shared_memory import SharedMemory

log = logging.getLogger("outlast.elastic")


class Recorder:
    """Notes the points of one `Job`, after `restored` and on `branch`. `keep` keeps memory over a
    kill, `mirror` mirrors it on another host; `check_running` raises if a restart has begun;
    in `ledger` the ranks meet before each step (`meeting`).

    `points` are those of the last completed step, in the order of its phases: the tensors of the
    model and the optimizer are the same in all of them. `equal_states` has what is known of the
    differences between the ranks of this iteration, and `iteration` is the one of the call in which
    this was made. `why` says, once `freeze` was called, why there is nothing to continue from; else
    it is empty.
    """

    def __init__(
        self,
        training: TrainingState,
        keep: Callable[[SharedMemory], object],
        restored: Record,
        branch: str,
        check_running: Callable[[], None],
        mirror: MakeMirror | None = None,
        ledger: CallLedger | None = None,
    ) -> None:
        entries = plain_state_dict(training.module, keep_vars=True)
        self._training: TrainingState | None = training
        self._entries: dict[str, Any] = entries
        self._buffers = Buffers(entries, training.module)
        _check_supported(training, entries, self._buffers)
        optimizers = list(training.optimizers.values())
        named = {name: each for name, each in entries.items() if isinstance(each, nn.Parameter)}
        self._parameters = list(named.values())
        self._gradients = Gradients(named, training.all_optimizers)
        self._queued = Queued(entries.values(), check_running)
        if self._queued.devices and (why := aborted_by_torch()):
            raise NotSupported(why)
        self._writes: Writes | None = Writes(self._parameters, optimizers)
        self._signature = signature(entries)
        self._keep, self._branch, self._mirror = keep, branch, mirror
        self._meeting: Meeting | None = None
        if ledger is not None:
            self._meeting = Meeting(ledger, training.all_optimizers)
        self.equal_states = training.equal_states
        self._rank, self._world_size = restored.rank, restored.world_size
        self.why, self.iteration = "", -1
        self._frozen: tuple[Frozen, ...] = ()
        self._early: tuple[int, dict[str, Any]] | None = None
        self._passes = 0  # backward passes of the coming step
        self._stepped = False
        self._needed: str | None = None
        own = self._own_state(training)
        shared, values = self._shared_state(training)
        payload = pickle.dumps({**own, "states": values})
        self._slots: Slots | None = Slots(len(payload), mirror)
        self._slots.write(restored, payload)
        keep(self._slots.memory)
        marks = self._writes.marks_with_digests()
        self.points: tuple[Point, ...] = (Point(restored, False, 0, shared, own, marks, {}),)
        self._removables: list[Any] = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(lambda each, *_: self._gradients.used(each)),
        ]
        parts = training.parts.values()
        self._is_of_rank = any(part.is_of_rank for part in parts)
        # Not the method: a copy of the model would copy this object.
        exchanges = [e for p in parts if (e := p.before_exchange(lambda: self._after_gradient()))]
        self._removables += exchanges
        for optimizer in () if exchanges else optimizers:
            self._removables += self._hook_on_gradient(optimizer)

    @property
    def point(self) -> Point:
        return self.points[-1]

    @property
    def all_frozen(self) -> tuple[Frozen, ...]:
        """The states of all phases to continue from, in their order, once `freeze` was called."""
        if any(each.versions.changed for each in self._frozen):
            self._frozen, step = (), self.point.record.step
            self.why = f"its state of step {step} was written to during the restore"
        return self._frozen

    def completed(self) -> None:
        assert self._training is not None
        assert self._writes is not None
        self._queued.await_results()
        step = self._training.counters.steps
        if self._meeting is not None:
            self._meeting.attend(step)
        own = self._own_state(self._training)
        early, self._early = self._early, None
        settled = early is not None and _without_files(early) == _without_files((step, own))
        rows = own["parts"].get("files")
        self._training.files.completed(early and early[1]["parts"].get("files"), rows)
        until = self._training.iteration.phase
        record = Record(self._branch, step, True, self._rank, self._world_size, until=until)
        shared, values = self._shared_state(self._training)
        self._write(record, {**own, "states": values})
        marks = self._writes.marks()
        gradients = self._gradients.note(self._stepped, self._writes.with_gradient)
        self.points = (Point(record, settled, self._passes, shared, own, marks, gradients),)
        self._passes, self._stepped = 0, False

    def later(self, phase: int, *, is_changed: bool = True) -> None:
        """Notes a later phase of the last step. If nothing has changed since the one before, that
        one holds for this phase, too; unless `is_changed`, that is known.
        """
        training, writes, point = self._training, self._writes, self.point
        assert training is not None
        assert writes is not None
        if self._stepped:
            return  # the tensors belong to no step
        if not is_changed:
            self._extend(phase)
            return
        self._queued.await_results()
        own = self._own_state(training)
        shared, values = self._shared_state(training)
        same = own == point.own and shared.same_as(point.shared)
        if same and not writes.counted_since(point.marks):
            self._extend(phase)
            return
        # Of a step that was restored, a phase that is made again belongs to the new branch.
        record = dataclasses.replace(
            point.record, branch=self._branch, phase=phase, until=phase, passes=0
        )
        marks = writes.marks()
        earlier: tuple[Point, ...] = () if writes.since(point.marks) else self.points
        self._write(record, {**own, "states": values})
        later = dataclasses.replace(point, record=record, shared=shared, own=own, marks=marks)
        self.points = (*earlier, later)

    def _extend(self, phase: int) -> None:
        if self._slots is not None:
            self._slots.extend(phase)
        record = dataclasses.replace(self.point.record, until=phase)
        self.points = (*self.points[:-1], dataclasses.replace(self.point, record=record))

    def freeze(self) -> None:
        """Ends the notes, removes the hooks, and keeps what is needed of the last point. Gradients
        are released. Call it when the function of the iteration has been left.
        """
        training = self._training
        if training is None:
            return
        if self._needed is None:  # an interrupted call may have released the gradients
            self._needed = self._gradients.needed(self.point.gradients)
        for parameter in self._parameters:
            parameter.grad = None
        step = self.point.record.step
        try:
            self._queued.drain()
            if self._stepped:
                self.why = f"the optimizer had begun step {step + 1}, which was not completed"
            elif self._needed:
                self.why = (
                    f"the gradient of {self._needed} was left over from step {step}, and no "
                    "optimizer's step has used it: if it is not needed, call zero_grad() before "
                    "job.step()"
                )
            elif self._written(training):
                self.why = f"its tensors were written to after step {step}"
            else:
                savers: dict[str, Saver] = {n: part.saved for n, part in training.parts.items()}
                self._frozen = tuple(
                    self._build(training, each, savers)
                    for each in self.points
                    if not each.shared.watched.changed
                )
        except Exception as e:  # noqa: BLE001 - the other ranks may have what is needed
            self.why = describe(e)
            log.warning("this rank cannot continue from its own state: %s", self.why)
        self._forget()

    def release(self) -> None:
        """Gives up the state: there is a newer one, or none is needed."""
        self._frozen = ()
        self._forget()

    def _forget(self) -> None:
        for each in self._removables:
            each.remove()
        self._gradients.close()
        if self._slots is not None:
            self._slots.close_mirror()
        self._removables, self._training, self._writes = [], None, None
        self._parameters, self._entries = [], {}

    def _own_state(self, training: TrainingState) -> dict[str, Any]:
        parts = training.parts.items()
        noted = {name: own for name, part in parts if (own := part.own()) is not None}
        return {"buffers": self._buffers.note(), "parts": noted}

    def _shared_state(self, training: TrainingState) -> tuple[Snapshot, dict[str, Any]]:
        """The state that all ranks share, and values of it that a later restore compares."""
        parts = training.parts.items()
        noted = {name: shared for name, part in parts if (shared := part.shared()) is not None}
        values = training.equal_states.at_step(noted.get("states", {}))
        return Snapshot({"parts": noted, "buffers": self._buffers.shared()}), values

    def _build(self, training: TrainingState, point: Point, savers: dict[str, Saver]) -> Frozen:
        shared = point.shared.read()
        model = {n: e if wraps(e) else e.detach() for n, e in self._entries.items()}
        parts = {name: training.parts[name].frozen(each) for name, each in shared["parts"].items()}
        state = {"model": model | self._buffers.initial | shared["buffers"], **parts}
        # Without its place in a file, a rank would write rows again.
        needs_all = self._is_of_rank or bool(point.own["parts"].get("files"))
        place = place_of(shared["parts"].get("epochs", {}))
        given = state, point, self._signature, savers, training.alike
        return Frozen(*given, resizable=not needs_all, place=place)

    def _written(self, training: TrainingState) -> bool:
        present = dict(training.module.named_parameters(remove_duplicate=False))
        replaced = any(
            isinstance(entry, nn.Parameter)
            and not isinstance(entry, DTensor)  # a sharded module shows others during a pass
            and present.get(name, entry) is not entry
            for name, entry in self._entries.items()
        )
        assert self._writes is not None
        written = self._writes.since(self.point.marks)
        return replaced or written or self.point.shared.watched.changed

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Any optimizer counts: the step of a second one belongs to the same step of the job."""
        # torch passes the optimizer itself as the first argument, then those of its `step`.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._begin_step(optimizer)
            return None

        def evaluate(*given: Any, **named: Any) -> Any:
            result = closure(*given, **named)
            self._begin_step(optimizer)
            return result

        if len(args) > 1:
            return (args[0], evaluate, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluate}

    def _begin_step(self, optimizer: Optimizer) -> None:
        """An optimizer writes next. If this is interrupted, it does not."""
        step, training = self.point.record.step + 1, self._training
        if training is not None and not self._stepped:
            early = self._early
            if early is None or early[0] != step:
                self._note_early()
            elif self._is_of_rank and (
                _without_files(early) != _without_files((step, self._own_state(training)))
            ):
                # A loader's state has changed since the backward pass. What a rank that was killed
                # in between has noted is not what it would have had: see `_usable`.
                self._passes += 1
                self._note_early()
        self._queued.await_gradients()
        if self._meeting is not None and self._meeting.is_for(optimizer):
            self._meeting.attend(step)
        self._stepped = True

    def _hook_on_gradient(self, optimizer: Optimizer) -> list[Any]:
        """Notes the coming step when the gradient of one parameter has been accumulated. DDP sends
        that gradient only afterwards, so no rank can complete the step before this rank's state
        is noted: also if the process is killed in the rest of the backward pass.
        """
        optimized = {id(parameter) for parameter in parameters_of(optimizer)}
        for each in reversed(self._parameters):
            is_hookable = each.requires_grad and each.is_leaf and not isinstance(each, DTensor)
            if is_hookable and id(each) in optimized:
                return [each.register_post_accumulate_grad_hook(self._after_gradient)]
        return []

    def _after_gradient(self, _: torch.Tensor | None = None) -> None:
        self._passes += 2  # an odd number: noted again after that
        self._note_early()

    def _note_early(self) -> None:
        if self._training is None:
            return
        step = self.point.record.step + 1
        own = self._own_state(self._training)
        # A state that may lack rows is not used: no rank has as many passes.
        passes = -1 if self._training.files.may_follow else self._passes
        record = Record(self._branch, step, False, self._rank, self._world_size, passes)
        self._write(record, own)
        self._early = (step, own)

    def _write(self, record: Record, own: dict[str, Any]) -> None:
        slots, payload = self._slots, pickle.dumps(own)
        if slots is None or slots.write(record, payload):
            return
        if not slots.memory.intact:
            self._slots = None
            log.info("the memory of this rank's own state is lost")
            return
        # The state has grown. The new memory has all that the old one has before it replaces it.
        larger = Slots(len(payload), self._mirror)
        for old, state in reversed(read(slots.memory)):
            larger.write(old, state)
        larger.write(record, payload)
        slots.close_mirror()
        self._keep(larger.memory)
        self._slots = larger


def _without_files(noted: tuple[int, dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Without the rows of text files: a rank that writes some late says so in its own note."""
    step, own = noted
    return step, own | {"parts": {n: part for n, part in own["parts"].items() if n != "files"}}


class NotSupported(Exception):
    """This state cannot be kept; says why."""


def _check_supported(training: TrainingState, entries: dict[str, Any], buffers: Buffers) -> None:
    for optimizer in training.optimizers.values():
        if not isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise NotSupported(f"{kind} is no torch.optim.Optimizer, so its steps cannot be marked")
    for name, entry in entries.items():
        if not isinstance(entry, nn.Parameter) and name not in buffers.initial:
            raise NotSupported(f"{name!r} of the model's state is no parameter, nor a plain buffer")
        if entry.device.type != "cpu" and not on_accelerator(entry):
            raise NotSupported(f"{name!r} is on {entry.device}, which is no accelerator of torch's")
        if name in buffers.initial and isinstance(entry, DTensor):
            raise NotSupported(f"the buffer {name!r} is sharded")
