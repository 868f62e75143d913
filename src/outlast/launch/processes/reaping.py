"""The launcher's children: how their ends are seen, and how they are reaped.

Children are seen to end by SIGCHLD, not by one descriptor for each: a subreaper gets children that
it did not start, and must reap those too. `waitid` reports ended children one at a time, so a
signal that stands for several of them loses none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def ended_children() -> Iterator[tuple[int, int]]:
    """Pid and exit code (negative for a signal) of every child that has ended and is not reaped.

    The caller must reap each (`reap`) before it asks for the next.
    """
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None:
            return
        code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        yield found.si_pid, code


def reap(pid: int) -> None:
    """Release an ended child."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
