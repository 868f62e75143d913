"""The verdicts of calls, for the main thread: a look, or a wait that can be interrupted.

torch's stores wait in C++, where neither signals nor Python exceptions arrive: a main thread that
waits there could be neither interrupted by Ctrl-C nor restarted in place. So another thread waits
there, and the main thread waits for that thread, in Python.
"""

from __future__ import annotations

from outlast.coordination.call_ledger import CallLedger, Verdict
from outlast.errors import OutlastError
from outlast.system.waiting import ThreadedWait

_STORE_S = 10.0
"""How long to wait for a store that should answer at once."""


class Verdicts:
    """The verdicts of a ledger. One thread asks for them; any other may call `give_up`.

    Every method raises `StoreError` when the store cannot be reached.
    """

    def __init__(self, ledger: CallLedger) -> None:
        self._ledger = ledger
        self._known: dict[int, Verdict] = {}  # a verdict never changes
        # The wait for the verdict with this index. It cannot be cancelled: it continues until the
        # verdict is there or the store is gone, so a later call joins the same wait.
        self._wait: tuple[int, ThreadedWait[Verdict]] | None = None
        self._error: OutlastError | None = None

    def look(self, index: int) -> Verdict | None:
        """The verdict, or `None` while there is none."""
        self._raise()
        if index not in self._known:
            verdict = self._ledger.verdict(index)
            if verdict is None:
                return None
            self._known[index] = verdict
        return self._known[index]

    def wait(self, index: int, timeout: float | None) -> Verdict | None:
        """Waits for the verdict; returns `None` after `timeout` seconds."""
        verdict = self.look(index)
        if verdict is not None or timeout == 0.0:
            return verdict
        if self._wait is None or self._wait[0] != index:
            self._wait = (
                index,
                ThreadedWait(lambda: self._ledger.await_verdict(index, None), "outlast-verdict"),
            )
        wait = self._wait[1]
        # `give_up` sets the error, then looks for a wait; here the order is reversed.
        self._raise()
        if not wait.over.wait(timeout):
            return None
        self._known[index] = verdict = wait.result()
        return verdict

    def settled(self, index: int) -> None:
        """Forgets a verdict that will not be asked for again."""
        self._known.pop(index, None)

    def await_wait(self, index: int) -> None:
        """From any thread: returns when nothing waits for this verdict, which exists by now.

        Call it before the ledger forgets the call: a wait that was given up, or overtaken by a
        look, continues until it has read the verdict, and would continue forever if the verdict
        were deleted first.
        """
        wait = self._wait
        if wait is not None and wait[0] == index:
            wait[1].join(_STORE_S)  # takes one answer of the store

    def give_up(self, error: OutlastError) -> None:
        """Ends all waits, from any thread: this rank cannot report, so there may be no verdict."""
        self._error = error
        wait = self._wait
        if wait is not None:
            wait[1].abandon(error)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
