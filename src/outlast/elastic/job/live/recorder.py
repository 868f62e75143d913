"""Notes the live point of this rank after each step, and marks the steps of optimizers.

Why a point is what it says: after `completed`, three things may change the tensors of the model and
the optimizer. An optimizer's step is announced by torch's hook before its first write, and makes
the point unusable. Another write to a parameter or to an optimizer's tensor is counted by torch,
and found when the point is frozen. A write to a parameter through `.data`, NumPy or a raw pointer
is not counted: it is found if it changes one of the elements that are compared (`contents`). Such a
write to an optimizer's tensors is not found.

An optimizer's step that is given a closure begins when the closure has returned for the first time:
until then the optimizer has only asked for gradients. Lightning runs the whole forward and backward
pass in there. LBFGS calls the closure again after its first writes: then the step has begun. If an
optimizer writes before it calls the closure, as for sharpness-aware minimization, these are other
writes. With a `GradScaler`, the backward pass precedes the step, which has no closure.

Gradients belong to no point. So a step of the job after which gradients are left over from a
backward pass that no optimizer's step has used (accumulation over steps of the job) has none.

A restart in place may interrupt `completed` at any point: a point is complete before the one
assignment that makes it the present one.
"""

from __future__ import annotations

import dataclasses
import logging
import pickle
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from outlast.async_checkpoint.kept_state import KeptState
from outlast.elastic.job.attached_states import pack
from outlast.elastic.job.live.contents import Sample, Samples, moments_of, writes_to
from outlast.elastic.job.live.point import (
    Frozen,
    Place,
    Versions,
    by_value,
    digest,
    signature,
    split,
)
from outlast.elastic.job.live.rank_state import Buffers, RankState, State, is_simple
from outlast.elastic.job.live.slots import Record, Slots, read
from outlast.elastic.job.live.snapshot import Snapshot
from outlast.elastic.job.training_state import TrainingState
from outlast.elastic.wrapped_modules import plain_state_dict
from outlast.system.error_text import describe

log = logging.getLogger("outlast.elastic")


@dataclasses.dataclass(frozen=True)
class _Point:
    """The last completed step. `shared` is the small state that is the same on all ranks,
    with `states` of the attached objects; `versions` and `watched` find writes to the parameters
    and to large tensors of these two;
    `sample` finds those to parameters that torch does not count, `moments` those to the optimizer.
    """

    place: Place
    settled: bool
    passes: int
    shared: dict[str, Any]
    states: dict[str, Snapshot]
    own: State
    versions: Versions
    watched: Versions
    sample: Sample
    moments: tuple[list[int], list[int]]


class Recorder:
    """Notes the points of one `Job`, from the end of `Job.restore` on.

    Args:
        training: the state of the job.
        kept: where the rank's own state survives a kill.
        place: the state that was restored.
        branch: the branch of the steps that follow.
        random: whether the random generators are part of the state.
        counters: the counters of the job at `place`.

    Raises:
        NotSupported: if the state cannot be kept.
    """

    def __init__(
        self,
        training: TrainingState,
        kept: KeptState,
        place: Place,
        branch: str,
        *,
        random: bool,
        counters: dict[str, Any],
    ) -> None:
        entries = plain_state_dict(training.module, keep_vars=True)
        self._training: TrainingState | None = training
        self._entries: dict[str, Any] = entries
        self._buffers = Buffers(entries, training.module)
        _check_supported(training, entries, self._buffers)
        self._parameters = [each for each in entries.values() if isinstance(each, nn.Parameter)]
        self._samples = Samples(self._parameters)
        self._signature = signature(entries)
        self._state = RankState(training, self._buffers, random=random)
        self._kept = kept
        self._branch = branch
        self._rank, self._world_size = place.rank, place.world_size
        # The ranks may still write equal values to their parameters before the first step, as
        # DistributedDataParallel does, or move them and the optimizer's tensors, as accelerate
        # does: then the contents decide, and not the counts and places.
        self._digests = {id(each): digest(each) for each in self._parameters}
        self._moments = [digest(each) for each in moments_of(training.optimizer)]
        self._frozen: Frozen | None = None
        self._early: tuple[int, State] | None = None
        self._passes = 0  # backward passes of the coming step
        own = self._state.note()
        payload = pickle.dumps(own)
        self._slots: Slots | None = Slots(len(payload))
        self._slots.write(self._record(place.branch, place.step), payload)
        kept.keep(self._slots.memory)
        self._stepped = self._accumulated = False
        self._why = ""
        self._first: _Point | None = None
        self._point = self._first = self._noted(place, counters, own, settled=False)
        self._removables = [register_optimizer_step_pre_hook(self._before_step)]
        if is_simple(training):
            self._removables += self._hook_on_gradient()

    @property
    def frozen(self) -> Frozen | None:
        """The state to continue from, once `freeze` was called; `None` if it is not complete."""
        found = self._frozen
        return None if found is None or found.versions.changed() else found

    @property
    def why(self) -> str:
        """Why there is nothing to continue from, once `freeze` was called."""
        if self._frozen is None:
            return self._why
        return f"its state of step {self._point.place.step} was written to during the restore"

    def completed(self, step: int, counters: dict[str, Any]) -> None:
        """Notes that `step` is complete, with all that belongs to it."""
        own = self._state.note()
        early, self._early = self._early, None
        settled = early is not None and early == (step, own)
        self._write(self._record(self._branch, step), own)
        place = Place(self._branch, step, self._rank, self._world_size)
        self._point = self._noted(place, counters, own, settled)
        self._passes = 0
        self._first = None
        self._digests, self._moments = {}, []
        # Without an optimizer's step, gradients that are there are still needed.
        has_gradients = any(p.grad is not None for p in self._parameters)
        self._accumulated = has_gradients and not self._stepped
        self._stepped = False

    def freeze(self) -> None:
        """Ends the notes, removes the hooks, and keeps what is needed of the last point. Gradients
        are released. Call it when the function of the iteration has been left.
        """
        self._unhook()
        training, self._training = self._training, None
        if training is None:
            return
        for parameter in self._parameters:
            parameter.grad = None
        step = self._point.place.step
        try:
            if self._stepped:
                self._why = f"the optimizer had begun step {step + 1}, which was not completed"
            elif self._accumulated:
                self._why = f"gradients were accumulated over step {step} and later ones"
            elif self._written(training):
                self._why = f"its tensors were written to after step {step}"
            else:
                self._frozen = self._build(training)
        except Exception as e:  # noqa: BLE001 - the other ranks may have what is needed
            self._why = describe(e)
            log.warning("this rank cannot continue from its own state: %s", self._why)
        self._parameters, self._entries, self._first = [], {}, None
        self._samples = Samples([])

    def release(self) -> None:
        """Gives up the state: there is a newer one, or none is needed."""
        self._unhook()
        self._training = self._frozen = self._first = None
        self._parameters, self._entries = [], {}
        self._samples = Samples([])

    def _noted(self, place: Place, counters: dict[str, Any], own: State, settled: bool) -> _Point:
        training, watched = self._training, Versions()
        assert training is not None
        present = training.shared_state()
        states = {name: Snapshot(each, watched) for name, each in present.pop("states").items()}
        shared = by_value(
            {
                "counters": counters,
                "groups": [
                    {key: value for key, value in group.items() if key != "params"}
                    for group in training.optimizer.param_groups
                ],
                **present,
            },
            watched,
        )
        versions = Versions(self._parameters)
        sample, moments = self._samples.take(), writes_to(moments_of(training.optimizer))
        return _Point(
            place, settled, self._passes, shared, states, own, versions, watched, sample, moments
        )

    def _build(self, training: TrainingState) -> Frozen:
        shared = dict(self._point.shared)
        optimizer = training.optimizer.state_dict()
        groups = zip(shared.pop("groups"), optimizer["param_groups"], strict=True)
        optimizer = {
            **optimizer,
            "param_groups": [{**noted, "params": group["params"]} for noted, group in groups],
        }
        model = {
            name: self._buffers.initial[name] if name in self._buffers else entry.detach()
            for name, entry in self._entries.items()
        }
        shared["states"] = {name: pack(each.read()) for name, each in self._point.states.items()}
        leaves: list[torch.Tensor] = []
        skeleton = split({"model": model, "optimizer": optimizer, **shared}, leaves)
        return Frozen(
            self._point.place,
            self._point.settled,
            self._point.passes,
            (skeleton, self._point.own),
            leaves,
            Versions(leaves),
            self._signature,
        )

    def _written(self, training: TrainingState) -> bool:
        """Whether a tensor of the point was written to since, or replaced."""
        point, moments = self._point, moments_of(training.optimizer)
        changed = point.versions.changed()
        rewritten = point.moments != writes_to(moments)
        sampled = point.sample != self._samples.take()
        if point is self._first:
            suspects = self._parameters if sampled else changed
            changed = [each for each in suspects if digest(each) != self._digests[id(each)]]
            sampled = False
            rewritten = rewritten and self._moments != [digest(each) for each in moments]
        present = dict(training.module.named_parameters(remove_duplicate=False))
        replaced = [
            name
            for name, entry in self._entries.items()
            if isinstance(entry, nn.Parameter)
            and not isinstance(entry, DTensor)  # a sharded module shows others during a pass
            and present.get(name, entry) is not entry
        ]
        return bool(changed or replaced or point.watched.changed() or sampled or rewritten)

    def _before_step(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Any optimizer counts: the step of a second one belongs to the same step of the job."""
        # torch passes the optimizer itself as the first argument, then those of its `step`.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._begin_step()
            return None

        def evaluate(*given: Any, **named: Any) -> Any:
            result = closure(*given, **named)
            self._begin_step()
            return result

        if len(args) > 1:
            return (args[0], evaluate, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluate}

    def _begin_step(self) -> None:
        """An optimizer writes next. If this is interrupted, it does not."""
        if not self._stepped and self._training is not None:
            step = self._point.place.step + 1
            if self._early is None or self._early[0] != step:
                self._note_early()
        self._stepped = True

    def _hook_on_gradient(self) -> list[Any]:
        """Notes the coming step when the gradient of one parameter has been accumulated. DDP sends
        that gradient only afterwards, so no rank can complete the step before this rank's state
        is noted: also if the process is killed in the rest of the backward pass.
        """
        for parameter in reversed(self._parameters):
            if parameter.requires_grad and parameter.is_leaf and not isinstance(parameter, DTensor):
                return [parameter.register_post_accumulate_grad_hook(self._after_gradient)]
        return []

    def _after_gradient(self, _: torch.Tensor) -> None:
        self._passes += 1
        self._note_early()

    def _note_early(self) -> None:
        step = self._point.place.step + 1
        own = self._state.note()
        self._write(self._record(self._branch, step, self._passes), own)
        self._early = (step, own)

    def _write(self, record: Record, own: State) -> None:
        slots, payload = self._slots, pickle.dumps(own)
        if slots is None or slots.write(record, payload):
            return
        if not slots.memory.intact:
            self._slots = None
            log.info("the memory of this rank's own state is lost")
            return
        # The state has grown. The new memory has all that the old one has before it replaces it.
        larger = Slots(len(payload))
        for old, state in reversed(read(slots.memory)):
            larger.write(old, state)
        larger.write(record, payload)
        self._kept.keep(larger.memory)
        self._slots = larger

    def _record(self, branch: str, step: int, passes: int | None = None) -> Record:
        """The description of a state: a final one, unless `passes` is given."""
        final = passes is None
        return Record(branch, step, final, self._rank, self._world_size, passes or 0)

    def _unhook(self) -> None:
        for each in self._removables:
            each.remove()
        self._removables = []


class NotSupported(Exception):
    """This state cannot be kept; says why."""


def _check_supported(training: TrainingState, entries: dict[str, Any], buffers: Buffers) -> None:
    if not isinstance(training.optimizer, Optimizer):
        kind = type(training.optimizer).__name__
        raise NotSupported(f"{kind} is no torch.optim.Optimizer, so its steps cannot be marked")
    for name, entry in entries.items():
        if not isinstance(entry, torch.Tensor) or not (
            isinstance(entry, nn.Parameter) or name in buffers
        ):
            raise NotSupported(f"{name!r} of the model's state is no parameter and no buffer")
        if entry.device.type != "cpu":
            raise NotSupported(
                f"{name!r} is on {entry.device}, whose work may still be in progress"
            )
        if name in buffers and isinstance(entry, DTensor):
            raise NotSupported(f"the buffer {name!r} is sharded")
