"""Whether a restart has begun on any rank, as far as this process knows without asking the store.

`elastic.job.live.queued` says who must know that: before each step on a device. The page that the
launcher shares with the workers of its host (`system.lease_page`) tells it:

- on one host, a rank changes the page before it aborts its collectives; if a rank cannot, it says
  so in the store before it enters the function, and no rank relies on the page;
- on many hosts with the store of the launchers, by the host's read lease
  (`coordination.replicated.read_leases`), for which the first rank that needs it asks.

Under any other launcher, with etcd, and while a host has no read lease, the store is asked.
"""

from __future__ import annotations

import logging
from pathlib import Path

from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import run
from outlast.inprocess.environment import Launch
from outlast.system.lease_page import LeasePage

log = logging.getLogger("outlast.inprocess")


class ReadLease:
    """The read lease of this host, as one rank sees it."""

    def __init__(self, launch: Launch) -> None:
        self._host = launch.host_id
        self._page: LeasePage | None = None
        self._running = -1, 0  # an iteration that ran when this was covered
        self._asked = False
        self._lacks = False  # the page of the host that has all ranks
        if launch.read_lease:
            try:
                if not self._host and launch.world_size != launch.local_world_size:
                    raise ValueError("another launcher has started ranks of this job")
                self._page = LeasePage.open(Path(launch.read_lease), write=not self._host)
            except (OSError, ValueError) as error:
                self._lacks = not self._host
                log.warning(
                    "the launcher's page %s cannot be used (%s): each step on a device asks the "
                    "store whether a restart has begun",
                    launch.read_lease,
                    error,
                )

    def begin(self, membership: MembershipProtocol) -> None:
        """Before this rank takes part in the call."""
        if self._lacks:
            run(membership.lack_page())

    def has_begun(self, membership: MembershipProtocol, iteration: int) -> bool:
        """Whether a restart has begun in this iteration. If not, no rank had begun an abort when
        this was called.
        """
        page, (known, covered) = self._page, self._running
        if page is not None:
            if known == iteration and page.unchanged(covered):
                return False
            # In this order: what is covered after the store has answered may count the restart.
            covered = page.covered
            if self._host and not self._asked:
                run(membership.ask_read_lease(self._host))
                self._asked = True
        if run(membership.over(iteration)) is not None:
            return True
        if self._host or page is None or not run(membership.lacks_page()):
            self._running = iteration, covered
        return False

    def recall(self) -> None:
        """Before this rank aborts its collectives. On many hosts `over/k` has done it."""
        if self._page is not None and not self._host:
            self._page.recall()

    def close(self) -> None:
        if self._page is not None:
            self._page.close()
