"""Iterates any loader from its batch `k` on, in the order in which it would have continued.

A loader draws the order of its batches from random generators when an iteration begins: from a
generator of its own, or from the global one. Their states at that moment are noted (`Beginning`).
To continue, the order is drawn again from the noted states, and the first `k` batches are dropped:
their indices, where torch's `DataLoader` has a sampler, so that no sample is loaded for nothing.
Other data, such as an `IterableDataset`, are read again up to there.

The moment is that of the sampler's first draw, and not that of `iter(loader)`: workers that persist
draw their seeds only in the first epoch of a process. So what workers draw to augment their samples
follows from the state at that moment, too, and from the number of the batch (`worker_seeds`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from outlast.elastic.data.permutation import mix64
from outlast.elastic.data.worker_seeds import Seeded, has_worker_processes
from outlast.elastic.numerics import generators

log = logging.getLogger("outlast.elastic")

Noted = dict[str, tuple[str, bytes]]
"""The states of generators, by name, as plain values: the type of their elements, and these."""

_OWN = "own"  # the names of generators that the loader was given: own0, own1, ...


class Beginning:
    """The beginning of one iteration.

    Args:
        dropped: how many batches to drop; `None` for all.
        ends: whether to yield nothing after that.
        noted: the states of the generators at the beginning; `None` if it begins only now.
        present: the states that the global generators have after a beginning that is repeated.
        worker_seed: a number of this iteration, for the seeds of a loader's workers; `None` if
            torch seeds them.

    Attributes:
        noted: as given, or as found when the iteration began.
    """

    def __init__(
        self,
        dropped: int | None = 0,
        ends: bool = False,
        noted: Noted | None = None,
        present: generators.Generators | None = None,
        worker_seed: int | None = None,
    ) -> None:
        self.dropped, self.ends, self.noted = dropped, ends, noted
        self.worker_seed = worker_seed
        self._present = present or {}

    def of(self, source: Iterable[Any], own: Sequence[torch.Generator]) -> Iterator[Any]:
        """The rest of an iteration of `source`, which may draw from the generators `own`."""
        if self.noted is None:
            self.noted = _note(own)
            return iter(source)
        _set(self.noted, own)
        iterator = iter(source)
        for _ in islice(iterator, self.dropped):
            pass
        _set(self._present)
        return iter(()) if self.ends else iterator


def resumed(loader: Iterable[Any], beginning: Beginning) -> Iterator[Any]:
    """The batches that are left of an iteration of `loader` with this beginning.

    Raises:
        ValueError: if the loader's persistent workers were started by another iteration.
    """
    own = _generators_of(loader)
    name = _sampler_of(loader)
    if name is None:
        if beginning.dropped:
            kind = type(loader).__name__
            log.info("reading the first %d batches of a %s again", beginning.dropped, kind)
        yield from beginning.of([] if beginning.ends else loader, own)
        return
    assert isinstance(loader, DataLoader)
    given = getattr(loader, name)
    sampler = _samplers.setdefault(loader, _Sampler(given))
    seeds = None
    if beginning.worker_seed is not None and has_worker_processes(vars(loader)):
        seeds = "torch" if loader.generator is None else f"{_OWN}0"  # as torch
    sampler.begin(beginning, own, seeds)
    if beginning.ends and not loader.persistent_workers:
        yield from sampler
        return
    # The iterator of a `DataLoader` takes its sampler when it is made; some subclasses make it when
    # the first batch is asked for. torch's own check forbids to replace a sampler.
    object.__setattr__(loader, name, sampler)
    try:
        batches = iter(loader)
        first = next(batches, _END)
    finally:
        object.__setattr__(loader, name, given)
    if not sampler.has_begun:
        raise ValueError(
            "the persistent workers of this DataLoader were started outside of job.batches(), so "
            "the order of its batches cannot be noted: iterate it with job.batches() only"
        )
    if first is not _END:
        yield first
        yield from batches


class _Sampler:
    """Stands in for a loader's sampler: begins each iteration as it is told to.

    Persistent workers keep the sampler that they were started with, so there is one for each
    loader.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._beginning: Beginning | None = None
        self._own: Sequence[torch.Generator] = ()
        self._seeds: str | None = None
        self.has_begun = False

    def begin(
        self, beginning: Beginning, own: Sequence[torch.Generator], seeds: str | None
    ) -> None:
        """Sets the beginning of the next iteration. `seeds`: the generator from whose state follow
        the seeds of the workers, if they get any.
        """
        self._beginning, self._own, self.has_begun = beginning, own, False
        self._seeds = seeds

    def __iter__(self) -> Iterator[Any]:
        beginning, seeds = self._beginning, self._seeds
        assert beginning is not None
        self.has_begun = True
        found = beginning.of(self._sampler, self._own)
        if seeds is None:
            yield from found
            return
        assert beginning.noted is not None
        assert beginning.worker_seed is not None
        _, state = beginning.noted[seeds]
        first = mix64(xxhash.xxh3_64_intdigest(state) + beginning.worker_seed)
        for number, indices in enumerate(found, beginning.dropped or 0):
            yield Seeded(indices, mix64(first + number))

    def __len__(self) -> int:
        return len(self._sampler)


_samplers: WeakKeyDictionary[DataLoader[Any], _Sampler] = WeakKeyDictionary()
_END = object()


def _sampler_of(loader: Any) -> str | None:
    """The attribute of a `DataLoader` with the sampler that its iterators draw from."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return "batch_sampler" if loader.batch_sampler is not None else "sampler"


def samplers_of(loader: Any) -> list[Any]:
    """The loader, and the objects in it that may determine the order of its batches."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [
        loader,
        getattr(loader, "dataset", None),
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ]
    return list({id(each): each for each in found if each is not None}.values())


def set_generators(states: generators.Generators) -> None:
    """Sets the global generators to captured states."""
    _set(states)


def _generators_of(loader: Any) -> list[torch.Generator]:
    found = [getattr(each, "generator", None) for each in samplers_of(loader)]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _note(own: Sequence[torch.Generator]) -> Noted:
    states = generators.capture()
    states.update({f"{_OWN}{i}": each.get_state() for i, each in enumerate(own)})
    return {
        name: (str(state.dtype).removeprefix("torch."), state.numpy().tobytes())
        for name, state in states.items()
    }


def _set(noted: Mapping[str, Any], own: Sequence[torch.Generator] = ()) -> None:
    """Sets the generators to noted states, or to captured ones."""
    for name, value in noted.items():
        state = value
        if not isinstance(value, torch.Tensor):
            dtype, content = value
            state = torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype))
        if not name.startswith(_OWN):
            generators.setter(name, state)()
        elif int(name.removeprefix(_OWN)) < len(own):
            own[int(name.removeprefix(_OWN))].set_state(state)
