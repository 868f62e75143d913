"""A pass over a loader in one epoch: how much of it is done, and how it continues at any batch.

A loader draws the order of its batches from random generators when an iteration begins. Their
states are noted at the sampler's first draw: workers that persist draw their seeds, in
`iter(loader)`, only in the first epoch of a process. To continue, the order is drawn again from
these states, and the first batches are dropped: their indices, where torch's `DataLoader` has a
sampler, so that no sample is loaded for nothing. Other data are read again up to there.

What workers draw to augment samples follows from these states, too, and from the number of the
batch (`Seeded`). Workers that read an `IterableDataset` draw its order from their seeds: they start
anew with each pass. At another number of ranks, a pass continues if the order of the samples over
all ranks is known, and each batch of all ranks is the next part of it (`global_batch`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from outlast.elastic import random_generators as generators
from outlast.elastic.data.loader import ElasticLoader
from outlast.elastic.data.stream import ShardedStream
from outlast.elastic.job.sampled_order import NOTE as ORDER
from outlast.elastic.job.sampled_order import OWN, Noted, SampledOrder, note, set_noted, states_of

log = logging.getLogger("outlast.elastic")

_FIRST = "first "  # before these names, of their states when the program had made them
_UNKNOWN = -1  # the length of a loader without one
_END = object()


@dataclasses.dataclass
class Pass:
    """One call of `Job.batches` in an epoch. An evaluation makes no steps: it is repeated whole."""

    length: int | None  # of a whole pass; `None` until this number of ranks begins it
    has_position: bool  # the loader's own state, which the job saves, has the position
    loader: str = ""  # the loader in words: see `described`
    change: str = ""  # what it was at the save and is now, in words, if that differs
    done: int = 0  # how many batches it had yielded at the last step that was made in it
    is_over: bool = False  # the loop has come to its end, or has left it
    is_exhausted: bool = False
    taken: int = 0  # how many batches it has yielded
    is_open: bool = False  # the loop is in it
    left_out: int = 0  # how many of its first batches are left out, whether they are done or not
    worker_seed: int | None = None  # for the seeds of a loader's workers; `None`: torch seeds them
    global_batch: int = 0  # as the function of this name, for the loader that it began with
    is_resized: bool = False  # it was saved within its batches by another number of ranks
    before: Noted | None = None  # of a job that continues between two epochs: see `at_end`
    _has_ended: bool = False
    _noted: Noted | None = None
    _order: SampledOrder | None = None  # of the indices, in this process
    _own: Sequence[torch.Generator] = ()
    _given: Noted = dataclasses.field(default_factory=dict)  # their states when it began
    _is_known: bool = False  # this process has iterated the loader before
    # Of the present iteration: how many batches to drop (`None`: all), whether to yield nothing
    # after that, and the states that the global generators have then.
    _dropped: int | None = 0
    _ends: bool = False
    _present: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def restored(cls, saved: Any, noted: Noted | None = None) -> Pass:
        length, has_position, done, is_over, is_exhausted, batch, *texts = saved
        if not done:
            return cls(length, has_position, "".join(texts))
        is_exhausted = is_exhausted or done == length
        is_over = is_over or is_exhausted
        found = cls(length, has_position, "".join(texts), done=done, is_over=is_over, taken=done)
        found.is_exhausted, found.global_batch, found._noted = is_exhausted, batch, noted
        return found

    def saved(self) -> tuple[int | None, bool, int, bool, bool, int, str]:
        """What is the same on all ranks."""
        position = self.length, self.has_position, self.done, self.is_over, self.is_exhausted
        return *position, self.global_batch, self.loader

    def compare(self, loader: Any) -> None:
        """Compares the loader with that at the save."""
        before, self.loader = self.loader, described(loader)
        if before and before != self.loader:
            self.change = f". The loader has changed: {self.loader}; {before} at the save"

    @property
    def noted(self) -> Noted | None:
        """The random generators of this rank when it began, if the order may depend on them."""
        if self._noted is None or (self.is_over and not self.done):
            return None
        # Of what the loop has taken: known before the step is complete, and the same after it.
        digest = b"" if self._order is None else self._order.after(self.taken)
        return {**self._noted, ORDER: (str(self.taken), digest)} if digest else self._noted

    def generators_after(self, before: Noted | None) -> Noted:
        """The loader's generators after this pass, for the next epoch. `before`: after the last."""
        found = {}
        for name, state in states_of(self._own).items():
            first = f"{_FIRST}{name}"
            found[first] = (before or {}).get(first, self._given[name])
            if before is None or self._given[name] != found[first]:
                found[name] = state  # else the program sets it to the same state for each epoch
        return found

    def _go_on(self, own: Sequence[torch.Generator]) -> None:
        """Sets the loader's generators as the epoch before has left them, unless the program has
        set them itself: to another state than that with which it has made them.
        """
        before = self.before or {}
        for name, state in self._given.items():
            is_first = before.get(f"{_FIRST}{name}") == state
            if name in before and (is_first or self._is_known):
                set_noted({name: before[name]}, own)

    @property
    def is_complete(self) -> bool:
        return self.is_exhausted or self.done == self.length

    @property
    def was_left(self) -> bool:
        """Whether the loop has left it right after a step."""
        left = self._has_ended and not self.is_complete
        return left and bool(self.done) and self.taken == self.done

    def batches(
        self, loader: Iterable[Any], present: generators.Generators | None, worker_seed: int | None
    ) -> Iterator[Any]:
        """The batches that are left. `present` are the states of the global generators with which a
        pass continues; those that they have by default. A `ValueError` if the loader's persistent
        workers were started by another iteration.
        """
        self.worker_seed = worker_seed
        self.is_open, is_over = True, self.is_over
        self.taken = max(self.taken, self.left_out)
        try:
            for batch in self._left_of(loader, present):
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
        self, loader: Iterable[Any], present: generators.Generators | None
    ) -> Iterator[Any]:
        if not self.done:
            if self.has_position:
                return iter(loader)
            self._noted, self._order, self._dropped = None, None, self.left_out
            self._ends, self._present = False, {}
            return self._resumed(loader)
        present = generators.capture() if present is None else present
        own_loader = isinstance(loader, ElasticLoader | ShardedStream)
        if self.has_position and self.is_over and not own_loader:
            _go_to_end(loader)
            set_noted(present)
            return iter(())
        # Without noted generators: by another number of ranks.
        if self.has_position or (self._noted is None and not self.is_resized):
            found = iter(loader if self.has_position else ())
            # accelerate's begins, and draws, with its first batch; in ours, that draws as always.
            if isinstance(found, Generator) and not own_loader:
                found = chain(list(islice(found, 1)), found)
            set_noted(present)
            return found
        dropped = max(self.done, self.left_out)
        self._dropped, self._ends = None if self.is_complete else dropped, self.is_over
        self._present = present
        return self._resumed(loader)

    def _resumed(self, loader: Iterable[Any]) -> Iterator[Any]:
        own = generators_of(loader)
        base = _base_of(loader)
        self._own, self._is_known = own, isinstance(base, DataLoader) and base in _samplers
        self._given = states_of(own)
        self._go_on(own)
        if not isinstance(base, DataLoader) or isinstance(base.dataset, IterableDataset):
            if self._dropped:
                kind = type(loader).__name__
                log.info("reading the first %d batches of a %s again", self._dropped, kind)
            persist = getattr(base, "persistent_workers", False)
            with _replaced(base, "persistent_workers", False) if persist else nullcontext():
                batches = self._begin([] if self._ends else loader, own)
                first = next(batches, _END)
            yield from () if first is _END else chain([first], batches)
            return
        name = "batch_sampler" if base.batch_sampler is not None else "sampler"
        sampler = _samplers.setdefault(base, _Sampler(getattr(base, name)))
        sampler.prepare(self, own, self._seeds_of(base))
        if self._ends and not base.persistent_workers:
            yield from sampler
            return
        with _replaced(base, name, sampler), _whole_iterator(base):
            batches = iter(loader)
            first = next(batches, _END)
        if not sampler.has_begun:
            what = "persistent workers of this DataLoader were"
            if not base.persistent_workers:
                what = "iterator of this DataLoader was"
            raise ValueError(
                f"the {what} started outside of job.batches(), "
                "so the order of its batches cannot be noted: iterate it with job.batches() only"
            )
        yield from () if first is _END else chain([first], batches)

    @contextlib.contextmanager
    def followed(self, loader: Any, worker_seed: int, *, was_iterated: bool) -> Iterator[None]:
        """A framework iterates `loader` in this context, and drops the batches that are done: their
        order is noted, or drawn as noted. `was_iterated`: before, maybe in another process.
        """
        own, base = generators_of(loader), _base_of(loader)
        self.worker_seed, self._dropped, self._ends, self._present = worker_seed, 0, False, {}
        has_batches = isinstance(base, DataLoader) and base.batch_sampler is not None
        if not has_batches or isinstance(base.dataset, IterableDataset):
            if was_iterated:
                generators.start_workers(base)
            self._begin([], own)
            yield
            return
        sampler = _samplers.setdefault(base, _Sampler(base.batch_sampler))
        with _replaced(base, "batch_sampler", sampler):
            if was_iterated:
                before = states_of(own)
                sampler.prepare(Pass(None, False), own, None)
                generators.start_workers(base)
                set_noted(before, own)
            sampler.prepare(self, own, self._seeds_of(base))
            yield

    def _seeds_of(self, base: Any) -> str | None:
        """The generator from which the seeds of the loader's workers follow, if they get any."""
        if self.worker_seed is None or not generators.has_worker_processes(vars(base)):
            return None
        return "torch" if base.generator is None else f"{OWN}0"  # as torch

    def _begin(self, source: Iterable[Any], own: Sequence[torch.Generator]) -> Iterator[Any]:
        """The rest of an iteration of `source`, which may draw from the generators `own`."""
        if self._noted is None:
            self._noted = note(own)
        else:
            set_noted(self._noted, own)
        iterator = iter(source)
        for _ in islice(iterator, self._dropped):
            pass
        set_noted(self._present)
        return iter(()) if self._ends else iterator

    def numbered(
        self, source: Iterable[Any], own: Sequence[torch.Generator], seeds: str | None
    ) -> Iterator[Any]:
        """As `_begin`, for the sampler of a loader: with the seeds of its workers, which follow
        from the noted state of the generator `seeds`, if they get any.
        """
        noted = None if self.is_resized else (self._noted or {}).get(ORDER)
        self._order = SampledOrder()
        followed = self._order.followed(source, noted, self.change)
        dropped, found = self._dropped or 0, self._begin(followed, own)
        if seeds is None:
            yield from found
            return
        assert self._noted is not None
        assert self.worker_seed is not None
        _, state = self._noted[seeds]
        first = generators.mix64(xxhash.xxh3_64_intdigest(state) + self.worker_seed)
        for number, indices in enumerate(found, dropped):
            yield generators.Seeded(indices, generators.mix64(first + number))


@contextlib.contextmanager
def _whole_iterator(loader: Any) -> Iterator[None]:
    """Drops the iterator that persistent workers keep, if one of them has died, or if an interrupt
    leaves the block, in which it begins anew: it would raise errors for ever.
    """
    kept = getattr(loader, "_iterator", None)
    if not all(worker.is_alive() for worker in getattr(kept, "_workers", ())):
        loader._iterator = None
    try:
        yield
    except BaseException:
        if getattr(loader, "_iterator", None) is not None:
            loader._iterator = None
        raise


def _go_to_end(loader: Any) -> None:
    """Goes on from a state with no batch left, and takes back a pass that the loader began."""
    base = _base_of(loader)
    state, found = base.state_dict(), iter(base)
    if next(found, _END) is not _END:
        base.load_state_dict(state)
    if base is not loader:  # accelerate's has a copy, of the last batch that it has yielded
        loader.dl_state_dict = base.state_dict()


def length_of(loader: Any) -> int:
    """The number of batches of a pass over `loader`, or -1."""
    if isinstance(loader, ElasticLoader | ShardedStream):
        return _UNKNOWN  # that of each rank alone may depend on the number of ranks
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return _UNKNOWN


def described(loader: Any) -> str:
    """What determines the batches of a `DataLoader`, in words, for an error; else empty."""
    base = _base_of(loader)
    if not isinstance(base, DataLoader):
        return ""
    try:
        samples = f"{len(base.dataset)} samples"  # type: ignore[arg-type]  # it may have none
    except Exception:  # noqa: BLE001 - of the program: this is only for an error
        samples = type(base.dataset).__name__
    outer = base if base.batch_sampler is None else base.batch_sampler
    size, drop_last = (getattr(outer, name, "unknown") for name in ("batch_size", "drop_last"))
    return f"batch_size={size}, drop_last={drop_last}, {samples}, {type(base.sampler).__name__}"


def global_batch(loader: Any, world_size: int) -> int:
    """The number of samples of a batch over all ranks, if the order of an epoch over all ranks
    depends on seed and epoch alone, and the batches of all ranks are the next samples of it; else
    0. A batch sampler of another library declares it with an attribute `resizable_batch`.
    """
    base = _base_of(loader)
    sampler, batches = getattr(base, "sampler", None), getattr(base, "batch_sampler", None)
    if type(batches) is BatchSampler and type(sampler) is DistributedSampler:
        return batches.batch_size * world_size if sampler.num_replicas == world_size else 0
    return int(getattr(batches, "resizable_batch", 0))


def samplers_of(loader: Any) -> list[Any]:
    """The loader, and the objects in it that may determine the order of its batches."""
    found, inner = [loader, getattr(loader, "dataset", None)], [loader]
    for _ in range(4):  # accelerate puts samplers into samplers
        names = "sampler", "batch_sampler"
        inner = [getattr(each, name, None) for each in inner for name in names]
        found += inner
    return list({id(each): each for each in found if each is not None}.values())


def generators_of(loader: Any) -> list[torch.Generator]:
    """The loader's own generators: `generator` attributes, and those of samplers, of any name."""
    found: list[Any] = [getattr(each, "generator", None) for each in samplers_of(loader)]
    base = _base_of(loader)
    others = {id(each) for each in (loader, base, getattr(base, "dataset", None))}
    for each in samplers_of(loader):
        if id(each) not in others:
            found += getattr(each, "__dict__", {}).values()
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def set_epoch(loader: Any, epoch: int) -> None:
    """Sets the epoch of all that may determine the order of the batches."""
    for each in samplers_of(loader):
        if callable(getattr(each, "set_epoch", None)):
            each.set_epoch(epoch)
    if hasattr(loader, "_num_iter_calls"):  # Fabric sets this as the epoch when it is iterated
        loader._num_iter_calls = epoch


def _base_of(loader: Any) -> Any:
    """The loader that iterates: those of accelerate and Fabric have torch's inside."""
    for name in ("base_dataloader", "_dataloader"):
        if isinstance(inner := getattr(loader, name, None), DataLoader):
            return inner
    return loader


@contextlib.contextmanager
def _replaced(loader: DataLoader[Any], name: str, value: object) -> Iterator[None]:
    """Replaces an attribute that the iterator of a `DataLoader` takes over when it is made, which
    some subclasses do when the first batch is asked for. torch's own check forbids it.
    """
    given = getattr(loader, name)
    object.__setattr__(loader, name, value)
    try:
        yield
    finally:
        object.__setattr__(loader, name, given)


class _Sampler:
    """Stands in for a loader's sampler: one per loader, since persistent workers keep theirs."""

    has_begun = False

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def prepare(self, next_pass: Pass, own: Sequence[torch.Generator], seeds: str | None) -> None:
        """Sets what the next iteration is; the other arguments are those of `Pass.numbered`."""
        self._pass, self._own, self._seeds, self.has_begun = next_pass, own, seeds, False

    def __iter__(self) -> Iterator[Any]:
        self.has_begun = True
        yield from self._pass.numbered(self._sampler, self._own, self._seeds)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)  # accelerate sets the epoch, and asks for the size


_samplers: WeakKeyDictionary[DataLoader[Any], _Sampler] = WeakKeyDictionary()
