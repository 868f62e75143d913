"""Ends the collectives in which a rank waits for another one that has failed.

If the work of a step raises on one rank, the others remain in the collective that it did not enter,
for the timeout of the process group: 30 minutes by default. So a thread waits for the verdict of
the step while this rank is at work in it. If the rank has not left its work by itself some time
after the verdict, which can only be a failure then, the thread ends the collectives of the process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from outlast.coordination.call_ledger import Round, Verdict
from outlast.coordination.stores.store import KeyTimeout
from outlast.coordination.waits import waits
from outlast.system.parallel import ThreadedWait

log = logging.getLogger("outlast.coordination")

GRACE_S = 3.0
"""How long a rank may take to leave its work by itself, once the step has failed."""


class CollectiveGuard:
    """Guards the work of this rank in `step`, which it encloses in `with`. `interrupt`: see
    `Agreement`.
    """

    def __init__(self, step: Round, interrupt: Callable[[threading.Event], None]) -> None:
        self._left = threading.Event()  # this rank has left its work
        self.has_verdict = threading.Event()

        def watch() -> Verdict:
            try:
                verdict = step.await_verdict(None)
                self.has_verdict.set()
                return verdict
            finally:
                if not self._left.wait(GRACE_S):
                    log.warning("a rank has failed: the collectives that wait for it are ended")
                    interrupt(self._left)

        self._wait = ThreadedWait(watch, "outlast-guard")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._left.set()

    def verdict(self, timeout_s: float) -> Verdict:
        with waits():
            if not self._wait.over.wait(timeout_s):
                raise KeyTimeout(f"no verdict within {timeout_s} s")
            return self._wait.result()

    def end(self) -> None:
        """There is a verdict: returns when the thread has it."""
        self._left.set()
        self._wait.over.wait()
