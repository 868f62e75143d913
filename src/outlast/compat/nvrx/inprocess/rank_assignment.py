"""Rank assignments, with the call of 0.4: `ctx -> ctx`."""

from __future__ import annotations

import abc
import dataclasses
import datetime
from collections.abc import Callable
from typing import Any, cast

from outlast.compat.nvrx import tree
from outlast.compat.nvrx.state import Mode, State, from_core, to_core
from outlast.compat.nvrx.tree import Layer, LayerFlag
from outlast.errors import RankDiscarded, RestartAbort
from outlast.inprocess import rank_assignment as core
from outlast.inprocess.compose import Compose, iter_parts
from outlast.inprocess.state import LazyStore
from outlast.system.arguments import Duration, check_callable, check_int

__all__ = [
    "ActivateAllRanks",
    "ActiveWorldSizeDivisibleBy",
    "AwaitReplacements",
    "FillGaps",
    "FilterCountGroupedByKey",
    "Layer",
    "LayerFlag",
    "MaxActiveWorldSize",
    "RankAssignment",
    "RankAssignmentCtx",
    "RankDiscarded",
    "RankFilter",
    "ShiftRanks",
    "Tree",
]


@dataclasses.dataclass
class RankAssignmentCtx:
    """What a rank assignment takes and returns.

    Attributes:
        state: the state of this rank.
        store: a `torch.distributed.Store` of all ranks.
        terminated_ranks: the ranks that are gone and not yet handled.
    """

    state: State
    store: Any
    terminated_ranks: set[int]


class RankAssignment(abc.ABC):
    """Gives the rank, the world size and the active world size of the next iteration."""

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Returns the changed context."""


class RankFilter(RankAssignment):
    """A rank assignment that only selects the active ranks: the lowest ones."""


class ActivateAllRanks(RankFilter):
    """All ranks call the function."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        return _activated(ctx, ctx.state.world_size)


class MaxActiveWorldSize(RankFilter):
    """At most `max_active_world_size` ranks call the function; `None` for no limit."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        if max_active_world_size is not None:
            check_int("max_active_world_size", max_active_world_size, at_least=1)
        self.max_active_world_size = max_active_world_size

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        size = _active_size(ctx.state)
        if self.max_active_world_size is not None:
            size = min(size, self.max_active_world_size)
        return _activated(ctx, size)


class ActiveWorldSizeDivisibleBy(RankFilter):
    """The number of ranks that call the function is a multiple of `divisor`."""

    def __init__(self, divisor: int = 1) -> None:
        check_int("divisor", divisor, at_least=1)
        self.divisor = divisor

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        size = _active_size(ctx.state)
        return _activated(ctx, size - size % self.divisor)


class _Moves(RankAssignment):
    _core: core.RankAssignment

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        before = to_core(ctx.state, getattr(ctx, "_held", None) or ctx.store)
        state, left = self._core(before, set(ctx.terminated_ranks))
        ctx.state = dataclasses.replace(ctx.state, rank=state.rank, world_size=state.world_size)
        ctx.terminated_ranks = set(left)
        return ctx


class ShiftRanks(_Moves):
    """Closes the gaps and keeps the order: `outlast.inprocess.rank_assignment.ShiftRanks`."""

    _core = core.ShiftRanks()


class FillGaps(_Moves):
    """Fills the gaps from the end: `outlast.inprocess.rank_assignment.FillGaps`."""

    _core = core.FillGaps()


class FilterCountGroupedByKey(RankAssignment):
    """Marks the ranks of each group whose number of healthy ranks fails `condition`.

    Args:
        key_or_fn: the group of this rank: a value whose text is its key, or `fn(state)`.
        condition: takes the number of healthy ranks of a group.
        timeout: for the exchange of the keys.
    """

    def __init__(
        self,
        key_or_fn: object,
        condition: Callable[[int], bool],
        timeout: datetime.timedelta = datetime.timedelta(seconds=60),
    ) -> None:
        check_callable("condition", condition)
        self.key_or_fn = key_or_fn
        self._core = core.FilterGroupedByKey("", condition, timeout)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        fn = self.key_or_fn
        self._core.key_or_fn = str(fn(ctx.state) if callable(fn) else fn)
        state = to_core(ctx.state, ctx.store)
        _, marked = self._core(state, set(ctx.terminated_ranks))
        ctx.terminated_ranks = set(marked)
        return ctx


class Tree(RankAssignment):
    """`outlast.compat.nvrx.tree.Tree`: ranks and reserve ranks by the topology of the job."""

    def __init__(
        self, layers: list[Layer], world_size_filter: Callable[[int], int] | None = None
    ) -> None:
        self.core = tree.Tree(layers, world_size_filter)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        state, _ = self.core(to_core(ctx.state), set(ctx.terminated_ranks))
        ctx.state = from_core(state, ctx.state.fn_exception)
        ctx.terminated_ranks = set()
        return ctx


class AwaitReplacements(RankAssignment):
    """Not in 0.4: `outlast.inprocess.rank_assignment.AwaitReplacements`, beside any others."""

    def __init__(self, timeout: Duration) -> None:
        self.core = core.AwaitReplacements(timeout)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        return ctx


class _CallCtx(RankAssignmentCtx):
    """A context whose store is connected on first use: most assignments do not use it."""

    def __init__(self, state: State, store: Any, terminated_ranks: set[int]) -> None:
        self.state, self.terminated_ranks = state, terminated_ranks
        self._held = store

    @property
    def store(self) -> Any:
        return self._held.get() if isinstance(self._held, LazyStore) else self._held


class CoreAssignment(core.RankAssignment):
    """An assignment of 0.4, as the wrapper of `outlast.inprocess` calls it."""

    def __init__(self, assignment: Any) -> None:
        self._assignment = assignment

    def __repr__(self) -> str:
        return repr(self._assignment)

    def __call__(self, state: Any, terminated_ranks: Any) -> Any:
        before = dataclasses.replace(
            from_core(state), mode=Mode.INITIALIZED, active_rank=None, active_world_size=None
        )
        ctx = _CallCtx(before, LazyStore(lambda: state.store), set(terminated_ranks))
        after = self._assignment(ctx)
        found = getattr(after, "state", None)
        if not isinstance(found, State):
            raise TypeError(f"{self!r} must return the context with its state, not {after!r}")
        if found.active_rank not in (None, found.rank):
            raise ValueError(
                f"{self!r} gave rank {found.rank} the active rank {found.active_rank}: the active "
                "ranks must be the lowest ranks"
            )
        if found.rank is None or found.mode is Mode.TERMINATED:
            raise RankDiscarded(f"rank {state.rank} is left out by {self!r}")
        if found.active_world_size == 0:
            raise RestartAbort(f"{self!r} leaves none of {found.world_size} ranks active")
        after_state = state.copy(
            rank=found.rank,
            world_size=found.world_size,
            active_world_size=found.active_world_size or 0,
        )
        return after_state, getattr(after, "terminated_ranks", None)


def as_core(assignment: Any) -> core.RankAssignment:
    """The assignment for the wrapper of `outlast.inprocess`. A `Tree` exchanges keys with it."""
    parts = list(iter_parts(assignment))[::-1]  # those are in the order of the calls
    waits = [part.core for part in parts if isinstance(part, AwaitReplacements)]
    others = [part for part in parts if not isinstance(part, AwaitReplacements)]
    if not waits:
        found: Any = assignment.core if isinstance(assignment, Tree) else CoreAssignment(assignment)
        return cast(core.RankAssignment, found)
    rest = Compose(*others) if others else Compose(ActivateAllRanks(), ShiftRanks())
    return Compose(as_core(others[0] if len(others) == 1 else rest), *waits)


def _active_size(state: State) -> int:
    if state.active_world_size is None:
        return state.world_size
    return min(state.active_world_size, state.world_size)


def _activated(ctx: RankAssignmentCtx, size: int) -> RankAssignmentCtx:
    active = ctx.state.rank is not None and ctx.state.rank < size
    ctx.state = dataclasses.replace(
        ctx.state,
        mode=Mode.ACTIVE if active else Mode.INACTIVE,
        active_rank=ctx.state.rank if active else None,
        active_world_size=size,
    )
    return ctx
