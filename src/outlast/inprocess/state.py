"""What a rank knows of its place in the job; given to every part of the wrapper."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

__all__ = ["LazyStore", "State", "Status"]


class Status(enum.Enum):
    """Where a rank is in its iteration."""

    INITIALIZED = "INITIALIZED"
    ACTIVE = "ACTIVE"
    INACTIVE = "INACTIVE"
    ABORTING = "ABORTING"
    ABORTED = "ABORTED"


class LazyStore:
    """A store that is connected to when it is first asked for. Most iterations never are."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._store: Any = None

    def get(self) -> Any:
        """The store; connected once."""
        if self._store is None:
            self._store = self._connect()
        return self._store


class _StoreField:
    """A field that may be given a `LazyStore`, and reads as the store behind it."""

    def __get__(self, state: State | None, owner: type[State]) -> Any:
        if state is None:
            return self
        held = state.__dict__["store"]
        return held.get() if isinstance(held, LazyStore) else held

    def __set__(self, state: State, value: Any) -> None:
        # What `__init__` passes when it is given no store is the default of the field: this object.
        state.__dict__["store"] = None if value is self else value


@dataclasses.dataclass
class State:
    """A rank's place in the job.

    Attributes:
        rank: in this iteration, 0 <= rank < world_size.
        world_size: how many ranks take part, the warm reserve included.
        active_world_size: how many of them call the function.
        initial_rank, initial_world_size: when this process first came.
        iteration: of the restart, from 0.
        status: see `Status`. A rank is active when the filter lets it call the function.
        store: a `torch.distributed.Store`, shared by all ranks of this iteration.
    """

    rank: int
    world_size: int
    initial_rank: int
    initial_world_size: int
    active_world_size: int = 0
    iteration: int = 0
    status: Status = Status.INITIALIZED
    store: Any = dataclasses.field(default=_StoreField(), repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.active_world_size:
            self.active_world_size = self.world_size

    @property
    def active(self) -> bool:
        """Whether this rank calls the function, as the filter left it."""
        return self.status is not Status.INACTIVE

    def copy(self, **changes: Any) -> State:
        """A copy, with `changes` made in it."""
        values = {f.name: self.__dict__[f.name] for f in dataclasses.fields(self)}
        return State(**{**values, **changes})
