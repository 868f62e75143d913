"""The session's side of `RunningCall`: stop requests and size requirements from inside the call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import drive, perform_on
from outlast.coordination.records import StopRecord
from outlast.inprocess.call_wrapper import CallWrapper
from outlast.inprocess.distributed.connection import Connection
from outlast.inprocess.recovery.rank_host import RankHost


class CallControl:
    """Implements `RunningCall`.

    Its store operations do not wait. They share the connection of the function's thread, on which
    operations of several threads take turns.

    Attributes:
        wrapper: what the function was given in this iteration; `None` before the first one.
    """

    wrapper: CallWrapper | None = None

    def __init__(
        self, host: RankHost, membership: MembershipProtocol, control: Connection, stack: ExitStack
    ) -> None:
        self._host, self._membership = host, membership
        self._perform = perform_on(control)
        self._stack = stack

    @property
    def rank(self) -> int:
        return self._host.state.rank

    @property
    def stop(self) -> StopRecord | None:
        return self._host.stop

    @property
    def terminated(self) -> bool:
        return bool(self._host.page.killed_hard)

    @property
    def fault_came_back(self) -> bool:
        return self._host.fault_came_back

    def request_stop(self, reason: str, exit_code: int) -> None:
        stop = StopRecord(reason, exit_code)
        drive(self._membership.request_stop(stop), self._perform)

    def saving_for_stop(self, limit_s: float) -> None:
        drive(self._membership.announce_last_save(limit_s), self._perform)

    def finish_stop(self, done: str) -> None:
        drive(self._membership.finish_stop(done), self._perform)

    def require_ranks(self, min_ranks: int | None) -> None:
        self._host.size.require(min_ranks, self._host.state)

    def long_phase(self, limit_s: float | None) -> AbstractContextManager[None]:
        return nullcontext() if self.wrapper is None else self.wrapper.long_phase(limit_s)

    def at_end(self, callback: Callable[[], None]) -> None:
        self._stack.callback(callback)
