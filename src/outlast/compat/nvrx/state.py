"""`State`, `FrozenState` and `Mode`, with the fields of 0.4."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Iterable

from outlast.inprocess import state as core

__all__ = ["FrozenState", "Mode", "State"]


class Mode(enum.Enum):
    """What a rank does in the iteration."""

    INITIALIZED = enum.auto()
    ACTIVE = enum.auto()
    INACTIVE = enum.auto()
    TERMINATED = enum.auto()


@dataclasses.dataclass
class State:
    """The rank of a process in the job.

    Attributes:
        rank, world_size: of all ranks, including the reserve; `rank` is `None` if terminated.
        active_rank, active_world_size: of the ranks that call the function; equal to `rank` where
            the rank is active.
        initial_rank, initial_world_size: the values when this process joined the job.
        iteration: the number of restarts so far.
        mode: what the rank does.
        fn_exception: the exception that the function raised on this rank, if any.
    """

    rank: int | None
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: BaseException | None = None

    def __post_init__(self) -> None:
        if self.initial_rank is None:
            self.initial_rank = self.rank
        if self.initial_world_size is None:
            self.initial_world_size = self.world_size

    @classmethod
    def from_env(cls) -> State:
        now = core.State()
        return cls(now.rank, now.world_size)

    def set_distributed_vars(self) -> None:
        os.environ.update(RANK=str(self.active_rank), WORLD_SIZE=str(self.active_world_size))

    def advance(self) -> None:
        self.iteration += 1
        self.fn_exception = None

    def freeze(self) -> FrozenState:
        return FrozenState(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    def copy_from(self, other: State | FrozenState, fields: Iterable[str] | None = None) -> None:
        """Copies `fields`, by default all, of another state."""
        for field in dataclasses.fields(self):
            if fields is None or field.name in fields:
                setattr(self, field.name, getattr(other, field.name))


@dataclasses.dataclass(frozen=True)
class FrozenState:
    """`State` with read-only fields."""

    rank: int | None
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: BaseException | None = None


def from_core(state: core.State, fn_exception: BaseException | None = None) -> State:
    """The state of a wrapped call with the fields of 0.4."""
    return State(
        rank=state.rank,
        world_size=state.world_size,
        active_rank=state.rank if state.active else None,
        active_world_size=state.active_world_size,
        initial_rank=state.initial_rank,
        initial_world_size=state.initial_world_size,
        iteration=state.iteration,
        mode=Mode.ACTIVE if state.active else Mode.INACTIVE,
        fn_exception=fn_exception,
    )


def to_core(state: State | FrozenState, store: object = None) -> core.State:
    """The state for a policy of `outlast.inprocess`."""
    inactive = state.mode is Mode.INACTIVE
    return core.State(
        rank=-1 if state.rank is None else state.rank,
        world_size=state.world_size,
        initial_rank=-1 if state.initial_rank is None else state.initial_rank,
        initial_world_size=state.initial_world_size or 0,
        active_world_size=state.active_world_size or 0,
        iteration=state.iteration,
        status=core.Status.INACTIVE if inactive else core.Status.INITIALIZED,
        store=store,
    )
