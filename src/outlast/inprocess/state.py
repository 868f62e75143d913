"""`State`: the rank of a process, the sizes and the iteration; passed to every policy."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from outlast.inprocess.environment import environment_rank

__all__ = ["LazyStore", "State", "Status"]


class Status(enum.Enum):
    """The progress of a rank in its iteration."""

    INITIALIZED = "INITIALIZED"
    ACTIVE = "ACTIVE"
    INACTIVE = "INACTIVE"
    ABORTING = "ABORTING"
    ABORTED = "ABORTED"


class LazyStore:
    """Connects to a store on first use. Most iterations never use it."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._store: Any = None

    def get(self) -> Any:
        """The store; connects once."""
        if self._store is None:
            self._store = self._connect()
        return self._store


class _StoreField:
    """A field that may be set to a `LazyStore`, and reads as the store it connects to."""

    def __get__(self, state: State | None, owner: type[State]) -> Any:
        if state is None:
            return self
        held = state.__dict__["store"]
        return held.get() if isinstance(held, LazyStore) else held

    def __set__(self, state: State, value: Any) -> None:
        # `__init__` without a store passes the default of the field, which is this object.
        state.__dict__["store"] = None if value is self else value


class _ActiveSizeField:
    """A field that reads as the world size until it is set to a number other than 0."""

    def __get__(self, state: State | None, owner: type[State]) -> Any:
        if state is None:
            return self
        return state.__dict__["active_world_size"] or state.world_size

    def __set__(self, state: State, value: Any) -> None:
        state.__dict__["active_world_size"] = 0 if value is self else value


@dataclasses.dataclass
class State:
    """The rank of a process in the job.

    Without arguments, the rank and the world size are those of the environment (`RANK`,
    `WORLD_SIZE`; 0 and 1 if they are not set). The fields may be set, to test a policy without a
    job::

        state = State()
        state.rank, state.world_size = 3, 8
        state, unhandled = ShiftRanks()(state, {1, 2})

    Attributes:
        rank: the rank in this iteration, 0 <= rank < world_size.
        world_size: the number of ranks, including the warm reserve.
        active_world_size: the number of ranks that call the function; by default, all.
        initial_rank, initial_world_size: the values when this process joined the job; by default,
            those of `rank` and `world_size`.
        iteration: the number of restarts so far.
        status: see `Status`. A rank is active if the filter lets it call the function.
        store: a `torch.distributed.Store`, shared by all ranks of this iteration.
    """

    rank: int = dataclasses.field(default_factory=lambda: environment_rank()[0])
    world_size: int = dataclasses.field(default_factory=lambda: environment_rank()[1])
    initial_rank: int = -1
    initial_world_size: int = 0
    active_world_size: int = dataclasses.field(default=_ActiveSizeField())  # type: ignore[assignment]
    iteration: int = 0
    status: Status = Status.INITIALIZED
    store: Any = dataclasses.field(default=_StoreField(), repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.initial_rank < 0:
            self.initial_rank = self.rank
        if not self.initial_world_size:
            self.initial_world_size = self.world_size

    @property
    def active(self) -> bool:
        """Whether this rank calls the function, by the rank filter."""
        return self.status is not Status.INACTIVE

    @property
    def in_job(self) -> bool:
        """Whether there is a store, as in a job. Does not connect to it."""
        return self.__dict__["store"] is not None

    def copy(self, **changes: Any) -> State:
        """A copy with `changes`."""
        values = {f.name: self.__dict__[f.name] for f in dataclasses.fields(self)}
        return State(**{**values, **changes})
