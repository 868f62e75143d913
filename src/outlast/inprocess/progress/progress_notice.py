"""One line for a rank that makes no progress, long before its timeout.

The rank that hangs says where it is. Ranks that wait for others in torch are silent, except rank 0:
its line is the only one if all ranks wait. A process that cannot run Python code at all says
nothing; its monitor process does (`monitor/frozen_notice.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from outlast.clock import Clock
from outlast.inprocess.progress.shared_page import Activity, SharedPage

log = logging.getLogger("outlast.inprocess")

AFTER_S = 10.0


class Stack(Protocol):
    """The stack of the function's thread; `Interrupter` implements it."""

    def user_place(self) -> str:
        """The innermost line of the user."""

    def waits_for_others(self) -> bool:
        """Whether it is where torch waits for other ranks."""


class ProgressNotice:
    """Called regularly, in another thread than the function's.

    Args:
        host: the name of this host.
        soft_timeout: the soft timeout of the settings, in seconds.
    """

    def __init__(
        self,
        page: SharedPage,
        stack: Stack,
        clock: Clock,
        host: str,
        soft_timeout: float,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        self._page, self._stack, self._clock = page, stack, clock
        self._host, self._soft_timeout, self._say = host, soft_timeout, say
        self._after = AFTER_S
        self._said: float | None = None  # the progress after which it was said

    def check(self) -> None:
        """Says it once for each hang. After a step that took long and ended, only a longer one is
        worth a line.
        """
        page = self._page
        progress = page.progress
        if self._said is not None and progress != self._said:
            self._after = max(self._after, 2 * (progress - self._said))
            self._said = None
        idle = self._clock.now() - progress
        declared = page.long_limit != 0
        if page.activity != Activity.FUNCTION or declared or idle < self._after:
            return
        if self._said is not None:
            return
        self._said = progress
        where = self._stack.user_place() or "an unknown place"
        who = f"rank {page.rank} on {self._host}"
        if not self._stack.waits_for_others():
            limit = page.soft_limit or self._soft_timeout
            idle_s = f"{idle:.0f} s"
            self._say(
                f"{who}: no progress for {idle_s}, at {where}; all ranks restart after {limit:g} s"
            )
        elif page.rank == 0:
            self._say(f"{who} has waited for other ranks for {idle:.0f} s, at {where}")
