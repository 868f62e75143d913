"""`LoaderPosition`: the position in a `DataLoader` that a framework iterates, for adapters; and
`LoaderOrder`, its order, for a framework that has a position.

A `Job` saves it as a data loader, rank by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from outlast.elastic import random_generators as generators
from outlast.elastic.job.passes import Pass, generators_of, length_of, samplers_of
from outlast.elastic.job.sampled_order import set_noted, states_of
from outlast.errors import CheckpointMismatch


class LoaderPosition:
    """The position in the batches of an epoch, each of which the framework trains on before it
    takes the next. `epoch` returns the number of the present epoch.
    """

    resizable = True  # so that `load_state_dict` sees the other number, and can say what to do

    def __init__(self, epoch: Callable[[], int], world_size: int) -> None:
        self._present_epoch, self._world_size = epoch, world_size
        self._pass: Pass | None = None
        self._epoch = -1  # of the pass

    def state_dict(self) -> dict[str, Any]:
        """The pass, in which all batches that were taken are done."""
        state: dict[str, Any] = {"world_size": self._world_size, "epoch": self._epoch}
        if self._pass is not None:
            self._pass.done = self._pass.taken
            state |= {"pass": self._pass.saved(), "noted": self._pass.noted}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps the pass until its loader is there."""
        found = Pass.restored(state["pass"], state["noted"]) if "pass" in state else None
        before = state["world_size"]
        if before != self._world_size:
            if found is not None and not found.is_complete:
                raise CheckpointMismatch(
                    f"the position in the data was saved by {before} ranks within an epoch, and "
                    f"there are {self._world_size} now: some samples would be repeated and others "
                    f"skipped. Continue with {before} ranks, or train with an "
                    "outlast.elastic.ElasticLoader, which supports any number, from the beginning"
                )
            found = None
        self._pass, self._epoch = found, state["epoch"]

    def of(self, loader: DataLoader[Any]) -> Any:
        """Stands in for the loader: the rest of the epoch, in order, with equal random numbers."""
        return _Resumed(loader, self)

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        epoch = self._present_epoch()
        if self._pass is None or self._epoch != epoch:
            self._pass, self._epoch = Pass(length_of(loader), False), epoch
        self._pass.compare(loader)
        if self._pass.length != len(loader):
            raise ValueError(
                f"epoch {epoch} was saved after {self._pass.done} of {self._pass.length} batches, "
                f"and now the loader has {len(loader)}{self._pass.change}. The job continues with "
                "the same one only"
            )
        yield from self._pass.batches(loader, None, generators.mix64(epoch))


class _Resumed:
    """Has all attributes of the loader."""

    def __init__(self, loader: DataLoader[Any], position: LoaderPosition) -> None:
        self._loader, self._position = loader, position

    def __iter__(self) -> Iterator[Any]:
        return self._position.batches(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """None: it is that of the position. But Lightning warns of a loader without this method."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def has_no_state(loader: Any) -> bool:
    """Whether this is a `DataLoader` with a length, and without a state of its own."""
    has_state = hasattr(loader, "state_dict")
    return isinstance(loader, DataLoader) and length_of(loader) >= 0 and not has_state


class LoaderOrder:
    """The order of a loader of which a framework itself skips what is done of an epoch: the states
    of the generators from which its sampler draws it.
    """

    def __init__(self) -> None:
        self._pass = Pass(None, False)  # of the present epoch

    def saved(self, done: int, loader: Any) -> tuple[Any, Any]:
        """The generators' states when this epoch began, with a digest of the first `done` batches;
        and the present ones of the loader's own generators.
        """
        self._pass.taken = done
        return self._pass.noted, states_of(generators_of(loader))

    def restore(self, saved: tuple[Any, Any], done: int, loader: Any) -> None:
        """The next `epoch` has done so many batches, and continues with the order that was saved.
        Between two epochs, with 0, sets the loader's own generators.
        """
        self._pass = Pass.restored((None, False, done, False, False, 0), saved[0])
        if not done:
            set_noted(saved[1], generators_of(loader))

    @contextmanager
    def epoch(self, loader: Any, number: int) -> Iterator[None]:
        """The framework begins an epoch, or what is left of it, in this context. A `ValueError` in
        there if the first batches are not those that are done.
        """
        is_resumed, self._pass.done = bool(self._pass.done), 0
        if not is_resumed:
            self._pass = Pass(None, False)
        for each in samplers_of(loader):  # accelerate's loader that skips does not reach all
            if each is not getattr(loader, "dataset", None) and hasattr(each, "set_epoch"):
                each.set_epoch(number)
        seed, was_iterated = generators.mix64(number), number > 0 and not is_resumed
        with self._pass.followed(loader, seed, was_iterated=was_iterated):
            yield
