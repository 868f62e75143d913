"""A data loader that tracks which samples were trained on, and resumes at any number of replicas.

    loader = ElasticLoader(dataset, global_batch_size=96, num_workers=4)
    for epoch in range(loader.epoch, 10):
        for images, labels in loader:
            (loader.weight * loss_fn(model(images), labels)).backward()
            if loader.boundary:
                optimizer.step()
                optimizer.zero_grad()

torch's `DataLoader` fetches the samples. Samples that its worker processes have prefetched do not
count until they have been trained on.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from outlast.elastic import environment
from outlast.elastic.data.sampler import ElasticSampler, Share
from outlast.elastic.random_generators import Seeded, has_worker_processes, mix64
from outlast.system.arguments import as_int, check_options, options_of

log = logging.getLogger("outlast.elastic")


def rank_and_replicas(rank: int | None, replicas: int | None) -> tuple[int, int]:
    """Rank and number of replicas: as given, or of the default process group or the environment."""
    if (rank is None) != (replicas is None):
        raise ValueError("give both rank and replicas, or neither")
    if rank is None or replicas is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return environment.replica_rank(), environment.num_replicas()
    rank, replicas = as_int("rank", rank, at_least=0), as_int("replicas", replicas, at_least=1)
    if rank >= replicas:
        raise ValueError(f"rank={rank} must be below replicas={replicas}")
    return rank, replicas


def warn_if_changed(now: int, state: Mapping[str, Any], *, rank: int, place: str) -> None:
    """Logs a warning on rank 0 if the size differs from the saved one; `place` is in the data."""
    saved = int(state.get("global_batch_size", now))
    if saved != now and rank == 0:
        log.warning(
            "the global batch size is %d, %d was saved: training continues at %s, and each step "
            "now takes %d samples; learning rates and schedules that count steps are not adjusted",
            *(now, saved, place, now),
        )


class ElasticLoader:
    """This replica's share of every global batch of a map-style dataset.

    Iterating yields the rest of the current epoch; the next iteration starts the next epoch. With
    `max_batch_size` or `virtual_replicas`, a share is split into parts: step the optimizer when
    `boundary` is true, after the last part of a global batch.

    Once its last part has been yielded, a global batch counts as trained on when the loop requests
    the next, `done` is called (`Job.step` does so), or the state is saved: so save after the
    optimizer's step.

    With `num_workers`, the global generators of a worker (Python, NumPy, torch) are seeded for each
    batch, from `seed`, the epoch and the position of the batch: so the random numbers of an
    augmentation are those of the batch, whichever worker loads it, also after a restore. Pass a
    `generator` to have torch seed the workers from it instead, once for each iteration.

    For arguments not described here, see `ElasticSampler`.

    Args:
        dataset: with `__len__` and `__getitem__`.
        rank: this replica's rank; by default that in the default process group.
        replicas: the number of replicas; by default the size of the default process group.
        options: for torch's `DataLoader`: `num_workers`, `collate_fn`, `pin_memory`, ...

    Attributes:
        sampler: the position in the data.
        weight: the factor of the mean loss of the current part.
        boundary: whether the current part is the last of a global batch.
        part: the number of the current part, among the `virtual_replicas` if there are any.
        trained: the number of samples, over all replicas, that were trained on since this object
            was created.
        holds_epoch: whether an epoch of which all batches are trained on lasts until `begin_epoch`:
            iterating then yields nothing. `Job.epochs` sets it.
        left_out: an epoch and a position in it: what is before that is not yielded. `Job` sets it.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        max_batch_size: int | None = None,
        virtual_replicas: int | None = None,
        rank: int | None = None,
        replicas: int | None = None,
        **options: Any,
    ) -> None:
        refused = {"batch_size", "sampler", "batch_sampler"} & set(options)
        if refused:
            given = sorted(refused)
            raise ValueError(f"{given} are set by global_batch_size and the number of replicas")
        if options.get("in_order") is False:
            raise ValueError(
                "in_order=False is not supported: positions would be recorded for the wrong batches"
            )
        check_options("ElasticLoader", options, options_of(DataLoader) | options_of(ElasticLoader))
        self.sampler = ElasticSampler(
            dataset,  # type: ignore[arg-type]  # a torch dataset with a length
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            max_batch_size=max_batch_size,
            virtual_replicas=virtual_replicas,
        )
        self.rank, self.replicas = rank_and_replicas(rank, replicas)
        self.weight, self.part, self.trained = 1.0, 0, 0
        self.boundary = self.holds_epoch = False
        self.left_out: tuple[int, int] | None = None
        self._dataset, self._options = dataset, options
        self._handed_out = self._iteration = 0

    @property
    def epoch(self) -> int:
        """The current epoch, starting at 0."""
        return self.sampler.epoch

    @property
    def at_end(self) -> bool:
        """Whether all batches of the epoch were trained on, and the next has not begun."""
        return self.sampler.position >= self.sampler.epoch_length

    def begin_epoch(self, epoch: int) -> None:
        """Goes to the beginning of this epoch, unless it has begun."""
        self.done()
        if epoch != self.epoch:
            self._go_to(epoch, 0)

    def resume_epoch(self, epoch: int) -> None:
        """Stays in this epoch, of which a state was loaded: a state from its end is loaded as one
        from the beginning of the next.
        """
        if (self.epoch, self.sampler.position) == (epoch + 1, 0):
            self._go_to(epoch, self.sampler.epoch_length)

    def __len__(self) -> int:
        """The number of global batches in a whole epoch; an epoch that was resumed yields fewer."""
        # Frameworks and schedulers ask once, maybe in a resumed epoch, for all epochs.
        return math.ceil(self.sampler.epoch_length / self.sampler.global_batch_size)

    def __iter__(self) -> Iterator[Any]:
        self.done()
        self._iteration += 1
        iteration = self._iteration
        if self._is_left_out():
            return
        fetched: deque[tuple[Share, int]] = deque()
        options = {"generator": self._generator(), **self._options}
        for data in DataLoader(self._dataset, batch_sampler=self._parts(fetched), **options):
            if iteration != self._iteration:
                raise RuntimeError(
                    "the loader was iterated again, or its state was loaded, during this iteration"
                )
            share, part = fetched.popleft()
            self.weight = share.weights[part]
            self.part = share.first + part
            self.boundary = part == len(share.weights) - 1
            self._handed_out = share.samples if self.boundary else 0
            yield data
            if iteration == self._iteration:
                self.done()

    def _is_left_out(self) -> bool:
        """Goes to the end of the left-out samples; returns whether the epoch is over before it."""
        sampler, to = self.sampler, self.left_out
        if to is None or (sampler.epoch, sampler.position) >= to:
            return False
        if sampler.epoch == to[0] and to[1] < sampler.epoch_length:
            sampler.position = to[1]
            return False
        if self.holds_epoch:
            sampler.position = sampler.epoch_length
        else:
            sampler.advance(sampler.epoch_length - sampler.position)
        return True

    def _parts(self, fetched: deque[tuple[Share, int]]) -> Iterator[Any]:
        """The batch sampler of torch's loader: yields the indices of each part in turn."""
        own = "generator" not in self._options and has_worker_processes(self._options)
        for share in self.sampler.shares(self.rank, self.replicas):
            for part, indices in enumerate(share.indices):
                fetched.append((share, part))
                yield Seeded(indices, self._seed_at(share.begins[part])) if own else indices

    def _generator(self) -> torch.Generator:
        """Seeds the workers of torch's loader. By default each iteration draws a seed from the
        global generator: a run that was stopped within an epoch would draw one more.
        """
        seed = mix64(self._seed_at(self.sampler.position) + self.rank)
        return torch.Generator().manual_seed(seed >> 1)

    def _seed_at(self, position: int) -> int:
        return mix64(mix64(self.sampler.seed * 0x1_0000_0001 + self.sampler.epoch) + position)

    def done(self) -> int:
        """Records that the last complete global batch was trained on. Returns its number of samples
        over all replicas, or 0 if already recorded.
        """
        samples, self._handed_out = self._handed_out, 0
        if samples:
            epoch, end = self.sampler.epoch, self.sampler.epoch_length
            self.sampler.advance(samples)
            if self.holds_epoch and self.sampler.epoch != epoch:
                self.sampler.epoch, self.sampler.position = epoch, end
            self.trained += samples
        return samples

    def _go_to(self, epoch: int, position: int) -> None:
        self.sampler.epoch, self.sampler.position = epoch, position
        self._handed_out = 0
        self._iteration += 1  # an iteration in progress has fetched from another position

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, the same on all replicas."""
        self.done()
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a saved position; see `ElasticSampler.load_state_dict`. Logs a warning on
        rank 0 if it was saved with another global batch size.
        """
        sampler, size = self.sampler, self.sampler.global_batch_size
        sampler.load_state_dict(state)
        self._go_to(sampler.epoch, sampler.position)
        place = f"sample {sampler.position} of {sampler.epoch_length} of epoch {sampler.epoch}"
        place += f", with {len(sampler)} steps left in it"
        warn_if_changed(size, state, rank=self.rank, place=place)
