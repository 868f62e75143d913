"""A pass over a loader in one epoch: how much of it is done, and how it continues."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from outlast.elastic.data.loader import ElasticLoader
from outlast.elastic.data.stream import ShardedStream
from outlast.elastic.job.epochs.resumed_iteration import Beginning, Noted, resumed, set_generators
from outlast.elastic.numerics.generators import Generators, capture

_UNKNOWN = -1  # the length of a loader without one


@dataclasses.dataclass
class Pass:
    """One call of `Job.batches` in an epoch.

    Attributes:
        length: the number of batches of a whole pass.
        has_position: whether the loader's own state, which the job saves, has the position.
        done: how many batches it had yielded at the last step that was made in it. An evaluation,
            in which no steps are made, has done none, and is repeated as a whole.
        is_over: whether the loop has come to its end, or has left it.
        taken: how many batches it has yielded.
        is_open: whether the loop is in it.
    """

    length: int
    has_position: bool
    done: int = 0
    is_over: bool = False
    is_exhausted: bool = False
    taken: int = 0
    is_open: bool = False
    _has_ended: bool = False
    _noted: Noted | None = None
    _beginning: Beginning | None = None

    @classmethod
    def restored(cls, saved: Any, noted: Noted | None = None) -> Pass:
        """The pass of which `saved` and `noted` were saved."""
        length, has_position, done, is_over, is_exhausted = saved
        if not done:
            return cls(length, has_position)
        is_exhausted = is_exhausted or done == length
        is_over = is_over or is_exhausted
        return cls(length, has_position, done, is_over, is_exhausted, taken=done, _noted=noted)

    def saved(self) -> tuple[int, bool, int, bool, bool]:
        """What is the same on all ranks."""
        return self.length, self.has_position, self.done, self.is_over, self.is_exhausted

    @property
    def noted(self) -> Noted | None:
        """The random generators of this rank when it began, if the order may depend on them."""
        if self.is_over and not self.done:
            return None
        return self._noted if self._beginning is None else self._beginning.noted

    @property
    def is_complete(self) -> bool:
        """Whether all batches were yielded."""
        return self.is_exhausted or self.done == self.length

    @property
    def was_left(self) -> bool:
        """Whether the loop has left it right after a step."""
        left = self._has_ended and not self.is_complete
        return left and bool(self.done) and self.taken == self.done

    def batches(
        self, loader: Iterable[Any], present: Generators | None, worker_seed: int | None
    ) -> Iterator[Any]:
        """The batches that are left. `present` are the states of the global generators with which a
        pass continues; those that they have by default. `worker_seed` as for `Beginning`.
        """
        self.is_open, is_over = True, self.is_over
        try:
            for batch in self._left_of(loader, present, worker_seed):
                if is_over:
                    break
                self.taken += 1
                yield batch
            self.is_exhausted = self.is_exhausted or not is_over
        finally:
            # Not over before that: after the last step of an epoch, nobody has asked for more.
            # An exception in the loop's body closes this generator, which may happen with an
            # interrupt on its way. It would be raised here by the first call or branch, and be
            # lost, as an exception is that closes a generator: assignments only.
            self.is_open, self.is_over, self._has_ended = False, True, True

    def _left_of(
        self, loader: Iterable[Any], present: Generators | None, worker_seed: int | None
    ) -> Iterator[Any]:
        if not self.done:
            if self.has_position:
                return iter(loader)
            self._beginning = Beginning(worker_seed=worker_seed)
            return resumed(loader, self._beginning)
        present = capture() if present is None else present
        if self.has_position or self._noted is None:  # without: by another number of ranks
            found = iter(loader if self.has_position else ())
            set_generators(present)
            return found
        dropped = None if self.is_complete else self.done
        self._beginning = Beginning(dropped, self.is_over, self._noted, present, worker_seed)
        return resumed(loader, self._beginning)


def length_of(loader: Any) -> int:
    """The number of batches of a pass over `loader`, or -1."""
    if isinstance(loader, ElasticLoader | ShardedStream):
        return _UNKNOWN  # that of each rank alone may depend on the number of ranks
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return _UNKNOWN
