"""The rank-local side shared by all members that are not processes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from outlast.coordination.decision import Decision, Rules
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link
from outlast.events.emitter import Place
from outlast.events.fault_record import FaultRecord
from outlast.inprocess.attribution import Interruption


class MinimalHost:
    """A base of the hosts of simulated members: nothing to clean up, and no events to emit."""

    place: Place
    preferred_rank: int
    member = -1
    rules = Rules()
    keeps = False
    succeeds: tuple[range, str, str] | None = None

    async def wait_over(self, link: Link, timeout: float | None) -> bytes:
        return await link.wait_for(f"over/{self.place.iteration}", timeout)

    async def settle(self) -> None:
        return None

    def serve(self) -> str | None:
        return ""

    async def hang_report(self, membership: MembershipProtocol) -> FaultRecord | None:
        return None

    def progress(self) -> dict[str, int]:
        return {"step": 0, "pings": 0, "least": 0}

    def fault(self, cause: str) -> FaultRecord:
        return self.fault_in(self.place.iteration, cause)

    def fault_in(
        self,
        iteration: int,
        cause: str,
        interruption: Interruption = Interruption.EXCEPTION,
    ) -> FaultRecord:
        return FaultRecord(
            iteration, self.member, self.preferred_rank, "no host", 0, interruption.value, cause
        )

    def fault_of(self, error: BaseException) -> FaultRecord:
        return self.fault_in(self.place.iteration, repr(error), Interruption.BASE_EXCEPTION)

    def timing(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()

    def decided(self, decision: Decision, *, reports: bool) -> None:
        return None

    def leaves_with(self, error: BaseException) -> None:
        return None
