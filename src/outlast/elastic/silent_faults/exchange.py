"""Exchanges one record of each rank per round, in the background, without waiting for a rank.

    1. Every rank publishes its record (`Round.finish`).
    2. Rank 0 sees that all have, compares the records, and publishes the result (`conclude`).
    3. Every rank reads the result, and gives up the keys (`forget`).

A rank looks for what the others have published when its training thread calls `results`, once per
step. A rank that dies leaves its round without a result; the next iteration of a restart in place
has a new ledger.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from torch import nn

from outlast.coordination.call_ledger import CallLedger, Round, connect_ledger
from outlast.coordination.stores.store import KeyTimeout
from outlast.coordination.waits import waits, works
from outlast.errors import StoreError
from outlast.events.emitter import Emitter, Sink
from outlast.system.devices import on_this_device
from outlast.system.parallel import start_thread

log = logging.getLogger("outlast.elastic")

R = TypeVar("R", bound="Running")
P = TypeVar("P")  # what a rank publishes, as JSON
S = TypeVar("S")  # the result, as JSON

_CLOSE_S = 5.0  # one store operation may be in progress


class Running:
    """The base of running checks. Close it, or use it in a `with` block."""

    def close(self) -> None:
        """Ends the check."""
        raise NotImplementedError

    def __enter__(self: R) -> R:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Startable(Generic[R]):
    """The base of checks: how a program without `Job` starts one."""

    def start(
        self, module: nn.Module, *, group: Any = None, events: Sink | None = None, step: int = 0
    ) -> R:
        """Starts the check, with parameters that are equal and finite now; a collective.

        Args:
            module: what all ranks train; wrappers such as DDP make no difference.
            group: the ranks to check; the default process group by default.
            step: the number of steps so far.

        Raises:
            NonFinite: of a `FiniteCheck` with `"stop"`, if a parameter is not finite.
            ValueError: if the parameters of `module` cannot be compared, or the check needs a
                `Job`; says why.
        """
        ledger, emitter = connect_ledger(type(self).__name__, group), Emitter(events)
        emitter.place.rank = ledger.rank
        return self._run(module, ledger, emitter, step)

    def _run(self, module: nn.Module, ledger: CallLedger, emitter: Emitter, step: int) -> R:
        raise NotImplementedError


class Exchange(Generic[P, S]):
    """One rank's part. `name` says in the log what ends if the store is lost. `judge` compares the
    records of all ranks, in the order of the ranks, and returns the result; it is called on rank 0
    alone, for one round after the other.
    """

    def __init__(
        self,
        ledger: CallLedger,
        name: str,
        judge: Callable[[Sequence[P]], S],
        record: type[P],
        result: type[S],
    ) -> None:
        self._ledger, self._name, self._judge = ledger, name, judge
        self._record_type, self._result_type = record, result
        self.rank = ledger.rank
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._results: deque[S] = deque()
        self._arrived = threading.Event()  # a result, or the loss of the store
        self._open: list[Round] = []  # rounds in which this rank has published; its thread's own
        self._unread = 0  # of `_open`, as the training thread counts them
        self._poked = self._closing = False
        self.error: Exception | None = None  # why the exchange has ended: most often, a lost store
        # Records read the device.
        self._thread = start_thread(f"outlast-{name}", on_this_device(self._run))

    def publish(self, record: Callable[[], P]) -> None:
        """Publishes the record that `record`, called in the background, returns."""
        self._unread += 1
        self._work.put(lambda: self._publish(record))

    def run(self, work: Callable[[], None]) -> None:
        """Calls `work` in the background, after all that was given before; also if the exchange has
        ended: the training thread may wait for it.
        """
        self._work.put(work)

    def results(self) -> list[S]:
        """The results that have arrived since the last call, oldest first. Looks for more in the
        background if a round is open. Call it on the training thread.
        """
        found = []
        while self._results:
            found.append(self._results.popleft())
        self._unread -= len(found)
        if self._unread and not self._poked and self.error is None:
            self._poked = True
            self._work.put(self._look)
        return found

    def all_results(self, timeout_s: float) -> list[S]:
        """Waits for the results of all rounds. If they do not all come, says so in the log, and
        returns those that have. Call it on the training thread.
        """
        end = time.monotonic() + timeout_s
        self._work.put(lambda: self._await_open(end))
        found: list[S] = []
        while True:
            self._arrived.clear()  # before the look: what arrives after it sets the event again
            found += self.results()
            if not self._unread or self.error:
                return found
            with waits():
                has_come = self._arrived.wait(max(0.0, end - time.monotonic()))
            if not has_come:
                text = "%s: no result within %g s: this state was not checked"
                log.warning(text, self._name, timeout_s)
                return found

    def close(self) -> None:
        """Ends the thread, after the work that it has."""
        self._closing = True
        self._work.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                with works(self):
                    work()
            except Exception as e:
                self.error = e
                if isinstance(e, StoreError):
                    # The job itself needs the store too: what ends here alone is a check. At the
                    # end of a job, another rank may have taken the store along.
                    level = logging.DEBUG if self._closing else logging.WARNING
                    log.log(level, "%s: no longer checked: %s", self._name, e)
                else:
                    log.exception("%s: no longer checked", self._name)
                self._arrived.set()

    def _publish(self, record: Callable[[], P]) -> None:
        if self.error:
            return
        content = msgspec.json.encode(record())
        opened = self._ledger.next()
        opened.finish(content)
        self._open.append(opened)
        self._look()

    def _look(self) -> None:
        self._poked = False
        while self._open and self.error is None:
            result = self._result(self._open[0])
            if result is None:
                return
            self._open.pop(0).forget()
            self._results.append(result)
            self._arrived.set()

    def _await_open(self, end: float) -> None:
        """Waits until `end` for the results of the open rounds."""
        while self._open and self.error is None:
            oldest, left_s = self._open[0], max(0.0, end - time.monotonic())
            try:
                _ = oldest.await_conclusion(left_s) if self.rank else oldest.await_verdict(left_s)
            except KeyTimeout:
                return  # the training thread, which waits for as long, says so
            self._look()

    def _result(self, opened: Round) -> S | None:
        if self.rank != 0:
            payload = opened.conclusion()
            return None if payload is None else msgspec.json.decode(payload, type=self._result_type)
        if opened.verdict() is None:
            return None
        kind = self._record_type
        result = self._judge([msgspec.json.decode(part, type=kind) for part in opened.parts()])
        opened.conclude(msgspec.json.encode(result))
        return result
