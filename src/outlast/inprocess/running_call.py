"""The running call of a wrapped function, as other packages of `outlast` see it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from outlast.coordination import moves
from outlast.coordination.decision import ViewRecord
from outlast.coordination.membership import MOVED, MembershipProtocol
from outlast.coordination.moves import LeaveRequest
from outlast.coordination.ops import run
from outlast.coordination.records import StopRecord
from outlast.errors import RankMoved, RestartAbort
from outlast.events.fault_record import FaultRecord
from outlast.inprocess.call_wrapper import CallWrapper
from outlast.inprocess.environment import Launch, launched_job
from outlast.inprocess.monitor.shared_page import SharedPage
from outlast.inprocess.read_lease import ReadLease
from outlast.inprocess.state import State
from outlast.system.departure import Departure


class RunningCall:
    """One call of a wrapped function, on this rank. It outlives the iterations: what is asked of it
    holds for the rest of the call, on every rank. Any thread may call its methods; they raise a
    `StoreError` if the store cannot be reached.
    """

    membership: MembershipProtocol  # set by the session

    wrapper: CallWrapper | None = None  # what the function was given; `None` before the first one
    # The request to stop that was known when the present iteration was decided: the same on all
    # ranks. This iteration is then the last one.
    stop: StopRecord | None = None
    grace_s = 30.0  # how long the last save may take that follows it
    # Whether the last iteration ended with a fault equal to one before it, without progress in
    # between. A process that has joined since does not know of it.
    fault_came_back = False
    # Saves, with all ranks that have one, what they keep of the job, which ends then. Called as the
    # function, in an iteration of its own; it creates its own process group. `None`: nothing.
    rescue: Callable[[], None] | None = None
    full = 0  # the number of active ranks at the start, if this process knows it
    least = 0  # the smallest number of active ranks with which the function may be called again
    least_is_known = False  # the function has called `require_ranks`, or never will
    member, present = -1, frozenset[int]()  # this process, and all in the present iteration
    # Set once this rank has handed its state over: it leaves the job, whatever interrupts it now.
    moved: RankMoved | None = None

    def __init__(
        self, page: SharedPage, launch: Launch, state: State, *, awaits: bool, has_filter: bool
    ) -> None:
        self.page, self.launch, self.state = page, launch, state
        self.read_lease = ReadLease(launch)
        self._awaits, self._has_filter = awaits, has_filter
        # By folder, what a job keeps of the present or the last iteration (`elastic.job.live`): it
        # outlives the iteration, until all ranks have restored a state, or the call ends.
        self.kept: dict[str, Any] = {}
        self.folders: set[str] = set()  # of all jobs
        self.modes: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # `elastic.job.model_parts`
        self._at_end = ExitStack()

    def __enter__(self) -> None:
        global _current
        _current = self

    def __exit__(self, *error: Any) -> None:
        global _current
        try:
            self._at_end.__exit__(*error)
        finally:
            _current = None

    @property
    def rank(self) -> int:
        return self.state.rank

    @property
    def terminated(self) -> bool:
        """Whether the hard timeout is over: SIGTERM is then no request to stop the job."""
        return bool(self.page.killed_hard)

    def request_stop(self, reason: str, exit_code: int) -> None:
        """Records a request to stop, known to all ranks from the next restart. The first counts."""
        run(self.membership.request_stop(StopRecord(reason, exit_code)))

    def note_stop_signals(self, numbers: Collection[int], exit_code: int) -> None:
        """Tells the launcher which signals are requests to stop from now on."""
        run(self.membership.note_stop_signals(numbers, exit_code))

    def saving_for_stop(self, limit_s: float) -> None:
        """Tells the launcher that the last save has begun, and how long it may take."""
        run(self.membership.announce_last_save(limit_s))

    def finish_stop(self, done: str) -> None:
        """Records the end of the stop, and what it saved: remaining ranks exit with its code."""
        run(self.membership.finish_stop(done))

    def leave_requests(self) -> tuple[int, LeaveRequest | None]:
        """How many requests there were that ranks leave; and one for all that are still here."""
        return run(moves.requests(self.membership, self.present))

    def await_leave_request(self, number: int) -> None:
        """Waits for the request with this number, or for `end_wait_for_leave_request`."""
        run(self.membership.link.wait_for(self._leave_key(number), None))

    def end_wait_for_leave_request(self, number: int) -> None:
        run(self.membership.link.put(self._leave_key(number), b"1"))

    def _leave_key(self, number: int) -> str:
        return moves.leave_key(self.state.iteration, number)

    def ask_to_leave(self, why: str) -> None:
        """Asks the launcher that this host leaves the job."""
        where = f"rank {self.rank}"
        Departure(0, "", [], asks=f"{where}: {why}").tell(launched_job())

    def begin_to_wait_for_leave_requests(self) -> None:
        """Tells joiners that the ranks can agree on a step, and the launchers how many it needs."""
        run(moves.begin_to_wait(self.membership, self.state.iteration, self.least))

    def end_iteration_to_grow(self) -> None:
        """On rank 0, after the agreed step: ends the iteration for processes that join."""
        run(self.membership.end(self.state.iteration, MOVED))

    @property
    def handover_key(self) -> str:
        """Where a rank that leaves says how its successor gets its state."""
        return f"handover/{self.launch.rank}"

    def long_phase(self, limit_s: float | None) -> AbstractContextManager[None]:
        """Declares a phase without pings, as `CallWrapper.long_phase`."""
        return nullcontext() if self.wrapper is None else self.wrapper.long_phase(limit_s)

    def check_running(self) -> None:
        """Raises `RankShouldRestart` if a restart has begun. If it returns, no rank had begun an
        abort when it was called. In the function's thread.
        """
        if self.wrapper is None:
            return
        if self.read_lease.has_begun(self.membership, self.wrapper.iteration):
            # This rank may not know of it yet: an event that is still on its way.
            self.wrapper.await_restart()
        with self.wrapper.atomic():  # whoever watches the iteration may have lost the store
            pass

    def at_end(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when the call ends on this rank, in any way."""
        self._at_end.callback(callback)

    def require_ranks(self, min_ranks: int | None) -> None:
        """Requires a number of active ranks for every further iteration; `None`: as many as at the
        start, unless the rank assignment has `AwaitReplacements`. A `RestartAbort` here if there
        are fewer already, else at the restart that leaves fewer.
        """
        self.least_is_known = True
        if min_ranks is None:
            self.least = 0 if self._awaits else self.full
        else:
            self.least = min_ranks
        if self.state.active_world_size < self.least:
            raise RestartAbort(self._refusal(self.state.active_world_size, [], None))

    def assigned(
        self, record: ViewRecord, member: int, state: State, cause: FaultRecord | None
    ) -> None:
        """`state` is that of the next iteration: a `RestartAbort` if too few ranks are left."""
        if not self.full:
            if state.iteration == 0:
                self.full = state.active_world_size
            elif not self._has_filter:
                self.full = self.launch.world_size
        asked = record.stop is not None or record.saves
        if not asked and state.active_world_size < self.least:
            lost = [rank for rank, member in enumerate(record.slots()) if member is None]
            raise RestartAbort(self._refusal(state.active_world_size, lost, cause))
        self.stop, self.member, self.present = record.stop, member, record.expected

    def _refusal(self, size: int, lost: list[int], cause: FaultRecord | None) -> str:
        what = ""
        if lost:
            ranks = "rank %s was" if len(lost) == 1 else "ranks %s were"
            first = "" if cause is None else f" ({cause.cause}; rank {cause.rank} on {cause.host})"
            what = f"{ranks % ', '.join(map(str, lost))} lost{first} and not replaced: "
        if self.launch.agent:
            why = (
                "outlast run replaces no rank that exits with code 0, or --max-restarts allows no "
                "further replacement, or none has joined"
            )
        elif self.launch.agent_store:
            why = "torchrun replaces no single rank; `outlast run` does"
        else:
            why = "nothing replaces a lost rank here; `outlast run` does"
        return (
            f"{what}the job has {size} of {max(self.full, self.least)} ranks left, and needs "
            f"{self.least}; {why}. To continue with fewer ranks, pass min_ranks={size} to "
            "outlast.Job. To wait for replacements that you start yourself, use AwaitReplacements "
            "in the rank assignment."
        )


_current: RunningCall | None = None


def running_call() -> RunningCall | None:
    """The call that runs in this process; `None` outside of wrapped functions."""
    return _current


def long_phase(limit_s: float | None) -> AbstractContextManager[None]:
    """`RunningCall.long_phase` in a wrapped function; does nothing outside of one."""
    return nullcontext() if _current is None else _current.long_phase(limit_s)
