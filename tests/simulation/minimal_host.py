"""The rank-local side shared by all members that are not processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from outlast.coordination.decisions.decision import Rules
from outlast.coordination.decisions.view import ViewRecord
from outlast.coordination.ops import Link
from outlast.coordination.records import FaultRecord, StopRecord
from outlast.inprocess.attribution import Interruption


class MinimalHost:
    """A base of the hosts of simulated members: nothing to clean up, and no events to emit."""

    preferred_rank: int
    host_id = ""
    member = -1
    fault_came_back = False
    rules = Rules()

    async def exchange(self, link: Link, record: ViewRecord, member: int) -> None:
        return None

    async def wait_over(self, link: Link, iteration: int, timeout: float | None) -> bytes:
        return await link.wait_for(f"over/{iteration}", timeout)

    async def settle(self, iteration: int) -> None:
        return None

    def serve(self) -> str | None:
        return ""

    def may_have_hung(self, iteration: int) -> bool:
        return False

    def hang_report(self, iteration: int, faults: list[FaultRecord]) -> FaultRecord | None:
        return None

    def least_ranks(self) -> int:
        return 0

    def progress(self) -> tuple[int, int]:
        return 0, 0

    def fault(self, iteration: int, interruption: Interruption, cause: str) -> FaultRecord:
        return FaultRecord(
            iteration, self.member, self.preferred_rank, "no host", 0, interruption.value, cause
        )

    def fault_of(self, iteration: int, error: BaseException) -> FaultRecord:
        return self.fault(iteration, Interruption.BASE_EXCEPTION, repr(error))

    def timing(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()

    def stopped(self, stop: StopRecord, cause: FaultRecord | None, reports: bool) -> None:
        return None

    def restarting(self, cause: FaultRecord | None, *, reports: bool) -> None:
        return None

    def leaves_with(self, error: BaseException) -> None:
        return None

    def unrecoverable(self, cause: FaultRecord, why: str, reports: bool) -> None:
        return None
