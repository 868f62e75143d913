"""Rank assignment policies: the ranks of the next iteration, when ranks of the last one are gone.

Every rank calls the assignment with its own state: `state.rank` is its previous rank, or the rank
at which a new process was admitted, and `state.world_size` is the number of ranks, including those
that are gone: the *terminated ranks*. An assignment gives the rank its new rank and world size, and
returns the terminated ranks that it leaves to the next policy. All ranks arrive at the same
arrangement without communication, because all start from the same sizes and terminated ranks.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import torch.distributed as dist

from outlast.errors import RankDiscarded, RankTimeout, StoreError
from outlast.inprocess.state import State
from outlast.system.arguments import Duration, as_timedelta, check_callable, seconds

__all__ = [
    "AwaitReplacements",
    "FillGaps",
    "FilterGroupedByKey",
    "MarkedRanks",
    "RankAssignment",
    "RankDiscarded",
    "ShiftRanks",
]


class RankAssignment(abc.ABC):
    """Arranges the ranks of the next iteration.

    If it raises, the exception is propagated unchanged: this rank leaves, and the others continue.

    Attributes:
        keeps_reserve: whether inactive ranks may take the place of lost ones: then a restart waits
            for replacements, by default, only if fewer ranks are left than were active.
    """

    keeps_reserve: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(
        self, state: State, terminated_ranks: AbstractSet[int]
    ) -> tuple[State, AbstractSet[int]]:
        """Returns the state with its new `rank` and `world_size`, and the terminated ranks not yet
        handled: none may be left after the last assignment.

        Args:
            state: the state of this rank; `rank` is less than `world_size`.
            terminated_ranks: ranks below `world_size` that are not in the next iteration. The
                wrapper passes a `set`; the policies of this module take any collection.

        Raises:
            RankDiscarded: if this rank is a terminated rank.
        """

    def prepare(self) -> None:  # noqa: B027 - an optional hook
        """Called once on each rank, at the start of a wrapped call."""

    def publish(self, state: State, *, for_newcomers: bool) -> str | None:
        """What this rank tells all ranks of the next iteration before the assignment; `None`, the
        default, if the assignment needs nothing of other ranks. All ranks publish, or none.

        Args:
            state: what the assignment will get.
            for_newcomers: whether this rank is one of those that tell new processes what all
                others know.
        """
        return None

    def receive(self, published: Mapping[int, str]) -> None:  # noqa: B027 - an optional hook
        """Called before the assignment with what the healthy ranks have published, by rank: the
        same on all ranks.
        """


class MarkedRanks(set[int]):
    """Terminated ranks, some with the reason for which a policy marked them.

    Attributes:
        why: the reasons, by rank.
    """

    def __init__(self, ranks: Iterable[int], why: Mapping[int, str]) -> None:
        """Creates the set."""
        super().__init__(ranks)
        self.why = why


@dataclasses.dataclass(eq=False)
class ShiftRanks(RankAssignment):
    """Closes the gaps: every rank is lowered by the number of gaps below it.

    The order is preserved.
    """

    def __call__(
        self, state: State, terminated_ranks: Collection[int]
    ) -> tuple[State, AbstractSet[int]]:
        gone = _checked(self, state, terminated_ranks)
        gaps = sum(gap < state.rank for gap in gone)
        return _moved(state, state.rank - gaps, gone), set()


@dataclasses.dataclass(eq=False)
class FillGaps(RankAssignment):
    """Fills the gaps from the end: as few ranks as possible change.

    With n ranks left, ranks below n are kept. The others, in order, move into the gaps, in
    ascending order.

    Without a store, outside of a job, rank r moves into gap number r - n, as the policy of
    nvidia-resiliency-ext does: outside the new size, perhaps, if a rank between them is lost too.
    """

    def __call__(
        self, state: State, terminated_ranks: Collection[int]
    ) -> tuple[State, AbstractSet[int]]:
        gone = _checked(self, state, terminated_ranks)
        size = state.world_size - len(gone)
        rank = state.rank
        if rank >= size:
            # There are as many ranks to move as gaps below `size`, which come first.
            moved = range(size, rank) if state.in_job else ()
            rank = sorted(gone)[rank - size - sum(other in gone for other in moved)]
        return _moved(state, rank, gone), set()


class KeyExchange:
    """Gives each healthy rank the keys of all healthy ranks.

    There may be several exchanges in one iteration (by node, then by rack). Each rank numbers its
    exchanges in the store, so one rank's nth exchange matches another's nth, regardless of the
    objects that make them. This works because all ranks run the same policies; a rank marked by an
    earlier exchange takes part in no later one, and no rank waits for it. Between two exchanges, a
    policy may drop marked ranks and change the ranks of the others. The world size is lower then,
    so it separates the exchanges of one rank number from those of its former holder.

    A rank deletes the keys that it wrote in earlier iterations, which all ranks have left.
    """

    def __init__(self) -> None:
        self._written: list[tuple[int, str]] = []

    def exchange(
        self, state: State, key: str, healthy: Collection[int], timeout: float
    ) -> dict[int, str]:
        """Publishes `key` as the key of `state.rank`, and waits for those of all `healthy` ranks;
        after `timeout` seconds, a `RankTimeout` names those that did not publish.
        """
        store = state.store
        if store is None:
            raise ValueError("state.store is None: keys are exchanged through a store")
        try:
            self._forget_before(state.iteration, store)
            keys = self._publish(state, key, healthy)
            missing = _await(store, keys, timeout)
            if not missing:
                values = store.multi_get(list(keys.values()))
                return {r: bytes(v).decode() for r, v in zip(keys, values, strict=True)}
        except (dist.DistError, RuntimeError) as e:
            raise StoreError(
                f"rank {state.rank}: the group keys of iteration {state.iteration} cannot be "
                f"exchanged: {e}"
            ) from e
        raise RankTimeout(
            f"rank {state.rank}: FilterGroupedByKey: in iteration {state.iteration}, ranks "
            f"{missing} did not publish their keys within timeout={timeout} s"
        )

    def _publish(self, state: State, key: str, healthy: Collection[int]) -> dict[int, str]:
        """Writes the key; returns the names of all ranks' keys, by rank."""
        prefix = f"outlast/group/{state.iteration}/{state.world_size}"
        counter = f"{prefix}/exchanges/{state.rank}"
        number = state.store.add(counter, 1)
        keys = {rank: f"{prefix}/{number}/{rank}" for rank in sorted(healthy)}
        state.store.set(keys[state.rank], key)
        self._written += [(state.iteration, counter), (state.iteration, keys[state.rank])]
        return keys

    def _forget_before(self, iteration: int, store: Any) -> None:
        for written, key in self._written:
            if written < iteration:
                with contextlib.suppress(RuntimeError):  # not every store can delete a key
                    store.delete_key(key)
        # The rest belongs to this iteration, or to a wrapped call that is over.
        self._written = [entry for entry in self._written if entry[0] == iteration]


def _await(store: Any, keys: dict[int, str], timeout: float) -> list[int]:
    """Waits for `keys`; returns the ranks whose key is missing after `timeout`."""
    try:
        store.wait(list(keys.values()), datetime.timedelta(seconds=timeout))
    except dist.DistNetworkError:
        raise
    except (dist.DistError, RuntimeError):  # FileStore reports a timeout as a RuntimeError
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        if missing:
            return missing
    return []


@dataclasses.dataclass(eq=False)
class FilterGroupedByKey(RankAssignment):
    """Marks every rank of a group that is not healthy enough, e.g., of a node that lost a GPU.

    Changes no ranks: a policy to its left drops the marked ranks, as in
    `Compose(ShiftRanks(), FilterGroupedByKey(lambda rank, size: rank // 8, lambda n: n == 8))`.

    Args:
        key_or_fn: the group of this rank: a value of any type whose text (`str`) is its key, e.g.,
            a host name, or `fn(rank, world_size)`, called with the rank before the assignment. The
            ranks exchange the texts through `state.store`. Without a store, outside of a job, the
            function is called for all healthy ranks.
        condition: takes the number of healthy ranks of a group, and returns whether they stay.
            Must return the same on each rank.
        timeout: the timeout of the exchange.

    Raises:
        RankTimeout: when called, if a healthy rank has not published its key within `timeout`;
            names it.
    """

    key_or_fn: object
    condition: Callable[[int], bool]
    timeout: Duration = datetime.timedelta(seconds=60)
    _exchange: KeyExchange = dataclasses.field(default_factory=KeyExchange, init=False, repr=False)

    def __post_init__(self) -> None:
        check_callable("condition", self.condition)
        self.timeout = as_timedelta("timeout", self.timeout)

    def __call__(
        self, state: State, terminated_ranks: Collection[int]
    ) -> tuple[State, AbstractSet[int]]:
        gone = as_ranks(terminated_ranks)
        if state.rank in gone:
            return state, gone  # the next policy raises
        keys = self._keys(state, gone)
        counts = collections.Counter(keys.values())
        failed = {key for key, count in counts.items() if not self.condition(count)}
        why = {
            rank: f"its group {key!r} has {counts[key]} healthy ranks, which fails the condition "
            "of FilterGroupedByKey"
            for rank, key in keys.items()
            if key in failed
        }
        why_before: Mapping[int, str] = getattr(gone, "why", {})
        return state, MarkedRanks(gone | why.keys(), {**why_before, **why})

    def _keys(self, state: State, terminated_ranks: AbstractSet[int]) -> Mapping[int, str]:
        healthy = [rank for rank in range(state.world_size) if rank not in terminated_ranks]
        fn = self.key_or_fn
        if callable(fn) and not state.in_job:
            return {rank: str(fn(rank, state.world_size)) for rank in healthy}
        key = str(fn(state.rank, state.world_size) if callable(fn) else fn)
        return self._exchange.exchange(state, key, healthy, seconds(self.timeout))


@dataclasses.dataclass(eq=False)
class AwaitReplacements(RankAssignment):
    """Holds a restart until lost ranks are replaced; after `timeout`, the job continues smaller.

    The wrapper looks for this policy in the rank assignment. Before deciding the members of the
    next iteration, it waits until there are as many processes as at the start, for at most
    `timeout`; less under `outlast run`, if that has no replacement left. Without this policy, a
    restart waits under `outlast run` only, and a `Job` never continues smaller by itself.

    As an assignment, the policy changes nothing, so its position does not matter:
    `Compose(ShiftRanks(), AwaitReplacements(timeout))`.

    Args:
        timeout: the maximum time for which a restart is held; 0 continues at once.
    """

    timeout: Duration

    def __post_init__(self) -> None:
        self.timeout = as_timedelta("timeout", self.timeout, allow_zero=True)

    def __call__(
        self, state: State, terminated_ranks: Collection[int]
    ) -> tuple[State, AbstractSet[int]]:
        return state, as_ranks(terminated_ranks)


def as_ranks(ranks: Collection[int]) -> AbstractSet[int]:
    """The ranks as a set; a set of `MarkedRanks` keeps its reasons."""
    return ranks if isinstance(ranks, AbstractSet) else set(ranks)


def _checked(policy: object, state: State, ranks: Collection[int]) -> AbstractSet[int]:
    """The terminated ranks; raises `RankDiscarded` if the rank is not in the next iteration."""
    terminated_ranks = as_ranks(ranks)
    unknown = sorted(rank for rank in terminated_ranks if not 0 <= rank < state.world_size)
    if unknown:
        raise ValueError(
            f"terminated_ranks: {unknown} are not ranks of a world size of {state.world_size}"
        )
    if state.rank in terminated_ranks:
        reasons: Mapping[int, str] = getattr(terminated_ranks, "why", {})
        why = reasons.get(
            state.rank, f"it is one of the terminated ranks {sorted(terminated_ranks)}"
        )
        raise RankDiscarded(
            f"rank {state.rank} (initial rank {state.initial_rank}) is left out of iteration "
            f"{state.iteration} by {type(policy).__name__}: {why}"
        )
    return terminated_ranks


def _moved(state: State, rank: int, terminated_ranks: AbstractSet[int]) -> State:
    size = state.world_size - len(terminated_ranks)
    return state.copy(rank=rank, world_size=size, active_world_size=0)
