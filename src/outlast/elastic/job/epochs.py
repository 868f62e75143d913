"""Where a job is in its epochs: `Job.epochs` and `Job.batches`.

A step's state says its epoch, and how many batches of each loader are done. When it is restored,
the loop gets that epoch again, with the batches that are left; if none are, its end runs again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from outlast.coordination.training_step import loop
from outlast.elastic import random_generators as generators
from outlast.elastic.data.loader import ElasticLoader
from outlast.elastic.data.stream import ShardedStream
from outlast.elastic.job.parts import Part
from outlast.elastic.job.passes import Pass, global_batch, length_of, set_epoch
from outlast.elastic.job.sampled_order import Noted
from outlast.errors import CheckpointMismatch
from outlast.events.hung_ranks import LEFT, NO_MORE
from outlast.system.arguments import as_int

log = logging.getLogger("outlast.elastic")

_SHARED = "shared"
_ENDED = 256  # epochs of which it is known what was done
_has_told = False  # this process, that what follows a step is not repeated


class Epochs(Part):
    """The epochs of one job, on one rank. `states` are the job's additional objects: a loader among
    them has its own position. `random`: the random generators are part of the job's state.
    """

    in_place = False

    def __init__(
        self, loader: Any, states: Mapping[str, Any], rank: int, world_size: int, *, random: bool
    ) -> None:
        self.steps = self.ended = 0  # of the job, and the epochs that have ended in this process
        self.by_framework = False  # a framework repeats what follows a step after a fault
        self.in_function = False  # one of `Job.after_steps` runs, which is part of a step
        self._own = loader if isinstance(loader, ElasticLoader | ShardedStream) else None
        self._with_position = [loader, *states.values()]
        self._rank, self._world_size, self._random = rank, world_size, random
        self._number: int | None = None  # until it is known that the program counts with it
        self._first_step: int | None = None  # the number of steps when the epoch began
        self._passes: list[Pass] = []
        self._left_by: list[Noted] = []  # the loaders' generators, as the epoch before left them
        self._continues = False  # between that epoch and the present one
        self._done: dict[int, tuple[int, ...]] = {}  # as `batches_done`, of the epochs before
        self.left_out: dict[int, tuple[int, ...]] = {}  # by epoch, of the first ones of each pass
        self.may_leave_out = False  # a later step may leave out the batches of this one
        self._calls = 0  # of `batches` in this epoch, since it was yielded
        self._inner = 0  # passes within another one
        self._restored: generators.Generators | None = None
        self._loop: object | None = None
        self._is_loaded = self._was_left = self._has_warned = False
        self._end = 0  # of the loop in progress
        self._left = 0  # the end of the loop that the program has left, and ended without an error

    @property
    def number(self) -> int:
        if self._number is None:
            return 0 if self._own is None else self._own.epoch
        return self._number

    @number.setter
    def number(self, number: int) -> None:
        self._left = 0
        self.left_out = {}
        self._begin(as_int("epoch", number, at_least=0), None)
        self._done = {}

    @property
    def first_step(self) -> int:
        return self.steps if self._first_step is None else self._first_step

    def loop(self, n: int) -> Iterator[int]:
        """The epochs from the present one to `n`, which is not included."""
        return self._to(as_int("n", n, at_least=0))

    def _to(self, end: int) -> Iterator[int]:
        if self._left >= end > 0:
            self._warn(
                "the program left the loop over job.epochs(%d) before its end, in epoch %d, "
                "and ended without an error: training is complete. To train on, set job.epoch "
                "before the loop, or ask for more epochs",
                self._left,
                self.number,
            )
            return
        loop, self._end, self._left = object(), end, 0
        self._loop = loop
        if self._number is None:
            if self.steps and self._own is None:
                self._warn(
                    "the state after step %d does not say in which epoch it was saved: continuing "
                    "with epoch 0. Set job.epoch before the loop to continue with another one",
                    self.steps,
                )
            self._begin(self.number, self.steps)
        try:
            while self.number < end:
                self._yielded()
                yield self.number
                if self._loop is not loop:
                    raise ValueError("another loop over job.epochs() has begun within this one")
                self._was_left = False
                if not self._is_loaded:
                    self._warn_of_left_passes()
                    self._end_epoch()
        finally:
            if self._loop is loop:
                self._loop = None
                if self._own is not None:
                    self._own.holds_epoch = False

    def _yielded(self) -> None:
        first_step = self.first_step
        if self._own is not None:
            self._own.holds_epoch = True
        elif self._is_loaded and not self._passes and self.steps > first_step:
            self._warn(
                "epoch %d begins again after step %d, although %d of its steps are done: only "
                "with job.batches() the job knows what is left of an epoch",
                self.number,
                self.steps,
                self.steps - first_step,
            )
        self._is_loaded, self._was_left = False, True  # left, unless the loop comes back
        self._first_step = first_step

    def _end_epoch(self) -> None:
        self.ended += 1
        before = [*self._left_by, *[None] * len(self._passes)]
        self._left_by = [p.generators_after(b) for p, b in zip(self._passes, before, strict=False)]
        self._continues = False
        self._begin(self.number + 1, self.steps)

    def _begin(self, number: int, first_step: int | None) -> None:
        self._done = self.batches_done()
        self._number, self._first_step = number, first_step
        self._passes, self._calls, self._inner, self._restored = [], 0, 0, None
        if self._own is not None:
            self._own.begin_epoch(number)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        if self._loop is None and not self.in_function:
            raise ValueError(
                "job.batches() yields what is left of an epoch: call it in a loop over job.epochs()"
            )
        has_position = any(each is loader for each in self._with_position)
        if not isinstance(loader, ElasticLoader | ShardedStream):
            set_epoch(loader, self.number)
        elif not has_position:
            raise ValueError(
                f"job.batches() was given a {type(loader).__name__} whose position the job "
                "does not save: pass it to Job(loader=...). If no steps are made on its "
                "batches, iterate it without job.batches()"
            )
        if self.in_function or self.in_batches:
            return self._within_another(loader)
        self._warn_of_left_passes()
        number, self._calls = self._calls, self._calls + 1
        length = length_of(loader)
        if number == len(self._passes):
            self._passes.append(Pass(length, has_position))
            if self._continues and number < len(self._left_by):
                self._passes[-1].before = self._left_by[number]
        found, batch = self._passes[number], global_batch(loader, self._world_size)
        found.length = length if found.length is None else found.length
        found.compare(loader)
        if found.is_resized and found.global_batch != batch:
            raise CheckpointMismatch(
                f"epoch {self.number} was saved by another number of ranks, after {found.done} "
                f"batches of {found.global_batch} samples over all ranks, and now they have "
                f"{batch or 'an order of their own'}: some samples would be repeated and others "
                f"skipped. Let each rank have {found.global_batch} samples / {self._world_size}"
            )
        found.global_batch = batch
        if not found.has_position:
            counts = self.left_out.get(self.number, ())
            found.left_out = counts[number] if number < len(counts) else 0
        if not found.has_position and not found.is_over and found.length != length:
            raise ValueError(
                f"epoch {self.number} was saved after {found.done} batches of a loader with "
                f"{found.length}, and now loader {number + 1} of the epoch has "
                f"{length} (-1: unknown){found.change}. A job that continues must call "
                "job.batches() with the same loaders in the same order"
            )
        return self._pass(loader, found, number)

    def _pass(self, loader: Iterable[Any], found: Pass, number: int) -> Iterator[Any]:
        passes = self._passes
        seed = generators.mix64(self.number) + number if self._random else None
        for batch in found.batches(loader, self._restored, seed):
            if self._passes is not passes:
                raise ValueError("this loop over job.batches() belongs to an epoch that is over")
            loop.take()
            yield batch
        loop.end(NO_MORE)

    def _within_another(self, loader: Iterable[Any]) -> Iterator[Any]:
        """An evaluation between two steps: it is not part of the state of a step."""
        self._inner += 1
        try:
            yield from loader
        finally:
            self._inner -= 1

    def stepped(self, steps: int) -> None:
        if self._inner:
            raise ValueError(
                "job.step() in a loop over job.batches() within another one: only the batches of "
                "one loop can be counted as done. Iterate the outer loader without job.batches(), "
                "or make one epoch of each of its batches"
            )
        self.steps = steps
        for each in self._passes:
            if each.is_open:
                each.done = each.taken

    @property
    def in_batches(self) -> bool:
        """Whether the program is in the body of a loop over `Job.batches`."""
        return any(each.is_open for each in self._passes)

    @property
    def in_evaluation(self) -> bool:
        """Whether it is in a loop within that one."""
        return self.in_function or self._inner > 0

    @property
    def at_end(self) -> bool:
        """Whether it is at the end of an epoch: after its loops over `Job.batches`."""
        passes = self._passes if self._loop is not None else []
        return bool(passes) and all(each.is_over for each in passes)

    @property
    def counts_batches(self) -> bool:
        """Whether steps were made on the batches of a loader that has no position of its own."""
        return any(each.done and not each.has_position for each in self._passes)

    def batches_done(self) -> dict[int, tuple[int, ...]]:
        """By epoch, the batches done or left out of each pass; 0 if its loader has a position."""
        passes = self._passes
        done = (0 if each.has_position else max(each.done, each.left_out) for each in passes)
        found = {**self.left_out, **self._done}
        merged = tuple(map(max, zip_longest(done, found.get(self.number, ()), fillvalue=0)))
        return found | ({self.number: merged} if merged else {})

    def finish(self) -> None:
        """The program has ended without an error: an epoch whose end it has left is over."""
        loop.end(LEFT)
        is_done = all(each.is_complete for each in self._passes)
        if not self._passes and self._own is not None:
            is_done = self._own.at_end
        if (
            self._was_left
            and not self._calls
            and any(each.done and not each.is_over for each in self._passes)
        ):
            self._warn(
                "the program left the loop over job.epochs() in epoch %d, which is resumed after "
                "step %d, before the batches that are left of it: training is complete. A test for "
                "early stopping belongs behind job.batches(), as what is before it runs again",
                self.number,
                self.steps,
            )
        if self._was_left:
            self._left = self._end
            if is_done:
                self._end_epoch()
        self._was_left = False

    # ---------------------------------------------------------------------------- the state

    @property
    def progress(self) -> tuple[int | None, int | None, int]:
        """What may differ in states of one step: the epoch, the loader's, whether it was left."""
        return self._number, None if self._own is None else self._own.epoch, self._left

    @property
    def place(self) -> str:
        return place_of(self.shared())

    @property
    def length(self) -> int:
        """The number of batches of the pass that the loop is in, on this rank; -1 if unknown."""
        found = next((each.length for each in self._passes if each.is_open), None)
        return -1 if found is None else found

    def save(self) -> dict[str, Any]:
        shared = self.shared()
        return {**shared, str(self._rank): self.own() or ()} if shared else {}

    def shared(self) -> dict[str, Any]:
        """Empty if the program does not use `Job.epochs`."""
        if self._number is None:
            return {}
        passes = tuple(each.saved() for each in self._passes)
        # Those that lie between the present step and a checkpoint to which it may go back.
        ended = tuple(sorted(self._done.items())[-_ENDED:]) if self.may_leave_out else ()
        at = self._number, self.first_step, self._world_size, passes, self._left
        return {_SHARED: (*at, ended)}

    def own(self) -> tuple[Any, ...] | None:
        noted = tuple(each.noted for each in self._passes), tuple(self._left_by)
        return noted if any(noted) else None

    @staticmethod
    def saved(shared: Any, own: Mapping[int, Any]) -> Any:
        return {**shared, **{str(rank): each for rank, each in own.items()}} if shared else {}

    def load(self, state: Mapping[str, Any], steps: int) -> None:
        """Continues from a saved state, once the loader was loaded. A state from another world
        size, within a pass of which only the batches of each rank are known, is an error.
        """
        passes: list[Pass] = []
        number = first_step = None
        left, ended = 0, ()
        if _SHARED in state:
            number, first_step, world_size, saved, left, ended = state[_SHARED]
            own = state.get(str(self._rank), ()) if world_size == self._world_size else ()
            noted, left_by = own or ((), ())
            self._left_by, self._continues = list(left_by), not saved
            passes = [Pass.restored(each, *noted[i : i + 1]) for i, each in enumerate(saved)]
            for each in passes:
                if world_size != self._world_size and not each.done:
                    each.length = None
                each.is_resized = (
                    world_size != self._world_size
                    and bool(each.done)  # else it is repeated as a whole
                    and not (each.has_position or each.is_complete)
                )
                if each.is_resized and not each.global_batch:
                    raise CheckpointMismatch(
                        f"step {steps} was saved by {world_size} ranks, after {each.done} of "
                        f"{each.length} batches (-1: unknown) of epoch {number}, and there are "
                        f"{self._world_size} ranks now: some samples would be repeated and others "
                        f"skipped. Continue with {world_size} ranks, or use "
                        "outlast.elastic.ElasticLoader or ShardedStream, which support any number"
                    )
        self.steps, self._number, self._first_step, self._left = steps, number, first_step, left
        self._passes, self._calls, self._inner, self._restored = passes, 0, 0, None
        self._is_loaded, self._done = True, dict(ended)
        if self._own is not None and number is not None:
            self._own.resume_epoch(number)

    def restored(self) -> None:
        """All is restored: passes continue with the generators as now, whatever draws before."""
        loop.begin(self.steps)
        if self._random and any(each.done for each in self._passes):
            self._restored = generators.capture()

    def warn_if_unused(self) -> None:
        """Warns, once a process, that what followed the last step is lost without `job.epochs`."""
        global _has_told
        in_epoch = isinstance(self._own, ElasticLoader) and self._own.sampler.position > 0
        unused = self._number is None and not self.by_framework
        if unused and self.steps and not in_epoch and self._rank == 0:
            log.log(
                logging.INFO if _has_told else logging.WARNING,
                "the fault came after step %d: if it was the last one of an epoch, the epoch's end "
                "(an evaluation) is not repeated. With job.epochs(), it is repeated",
                self.steps,
            )
            _has_told = True

    def _warn_of_left_passes(self) -> None:
        left = next((each for each in self._passes if each.was_left), None)
        if left is not None and not self._has_warned:
            self._has_warned = True
            self._warn(
                "a loop over job.batches() was left right after job.step(), with %d of %d "
                "batches done: after a fault before the end of the epoch, it would go on with the "
                "next batch. Test the condition at the beginning of the loop's body",
                left.done,
                left.length,
            )

    def _warn(self, message: str, *values: object) -> None:
        if self._rank == 0:
            log.warning(message, *values)


def place_of(shared: Mapping[str, Any]) -> str:
    """Where a state is, as text: its epoch and the batches done. `shared`: see `Epochs.shared`."""
    if not shared:
        return ""
    number, _, _, passes, *_ = shared[_SHARED]
    done = " + ".join(str(done) for _, has_position, done, *_ in passes if not has_position)
    return f", epoch {number}" + (f", {done} batches" if done else "")
