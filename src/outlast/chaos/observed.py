"""The part of the restart wrapper's objects that an injector reads."""

from __future__ import annotations

from typing import Protocol


class ObservedState(Protocol):
    """The part of `inprocess.State` that an injector reads."""

    @property
    def rank(self) -> int: ...


class ObservedCall(Protocol):
    """The part of `inprocess.CallWrapper` that an injector reads."""

    @property
    def iteration(self) -> int: ...
    @property
    def state(self) -> ObservedState: ...
    @property
    def monitor_pid(self) -> int | None: ...
