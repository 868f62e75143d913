"""A training that is told to stop saves after a common step, and ends: for `Job` and for adapters
of frameworks that have a `Checkpointer`, and no `Job`.

A request to stop outlives the iteration in which it arrives. It is kept in three places:

- *This process.* The signal handlers and the request (`StopRequest`) live as long as the wrapped
  call: the next `StopSignals` of this process passes the request on when it begins.
- *The store of the call.* A thread writes the request there before it asks the ranks to agree on a
  last step. So once any rank acts on a request, every later decision on a next iteration reads it.
  That iteration is then the last one (`ViewRecord.with_stop`): it saves what only memory has.
  The launcher writes it there, too, before it forwards its signal to the ranks.
- *The agreement of the iteration* (`stop_agreement`), which stops all ranks after the same step. A
  fault ends it; the other two remain.

A signal handler only puts a value into a `SimpleQueue`: that is safe wherever the main thread is.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterable
from types import FrameType
from typing import Any, Protocol

from outlast.async_checkpoint import Checkpointer
from outlast.elastic.leaving import LeaveWatch, LiveState, leave
from outlast.elastic.stop_agreement import StopAgreement
from outlast.errors import StoreError
from outlast.events.types import StopRequested
from outlast.inprocess.running_call import RunningCall, long_phase, running_call
from outlast.system.arguments import Duration, as_timedelta
from outlast.system.error_text import signal_name
from outlast.system.fork import keep_signals_at_forks
from outlast.system.notices import leave_closed_terminal, notice

log = logging.getLogger("outlast.elastic")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
PREEMPTED = 143  # 128 + SIGTERM: what schedulers expect from a job that they told to stop


class Listener(Protocol):
    """Is told of a request to stop, by a thread."""

    def request(self, reason: str) -> None: ...

    def close(self) -> None: ...


class StopSignals:
    """Handles the signals from its creation to `close`. All ranks create one, and call the same
    methods. Signals keep their handlers after a fault in a wrapped call, for the next iteration.

    Args:
        checkpointer: through which the training saves.
        signals: the signals on which to save and exit. A second SIGINT has its usual effect. SIGHUP
            is not handled if it was ignored before (`nohup`).
        grace: how long the last save may take.
        exit_code: the exit code of a training that was told to stop.

    Attributes:
        grace_s: how long the last save may take, in seconds.
        request: requests a stop, for a reason. Safe to call from any thread.
        attach, detach: as those of `StopRequest`, after the last step.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        *,
        signals: Iterable[int] = SIGNALS,
        grace: Duration = datetime.timedelta(seconds=30),
        exit_code: int = PREEMPTED,
    ) -> None:
        self.grace_s = as_timedelta("grace", grace, allow_zero=True).total_seconds()
        self._checkpointer, self._exit_code = checkpointer, exit_code
        self._call, self._ledger = running_call(), checkpointer.ledger.child("stop")
        if self._call is not None:
            self._call.grace_s = self.grace_s
        self._agreement: StopAgreement | None = None
        self._leaves: LeaveWatch | None = None
        self._closed = False
        self._request = _present_request(self._call)
        self.request = self._request.request
        self.attach, self.detach = self._request.attach, self._request.detach
        self._request.user = self._user = object()
        self._request.install(tuple(signals), exit_code)

    def begin(self, step: int, save: Callable[[], object]) -> None:
        """Call it when the state after `step` is restored, or at the start of the training. If that
        was told to stop before a restart in place, calls `save`, waits for the commit, and raises
        a `SystemExit`.
        """
        if self._call is not None and self._call.stop is not None:
            self._exit(step, self._call.stop.reason, save)
        if self._agreement is None and not self._closed:
            self._agreement = StopAgreement(self._ledger, step + 1)
            self._request.attach(self._agreement)
            if self._call is not None and self._call.launch.agent and self._ledger.rank == 0:
                self._leaves = LeaveWatch(self._call, self._agreement)

    def completed(
        self,
        step: int,
        save: Callable[[], object],
        live: LiveState | None = None,
        save_for_move: Callable[[], object] | None = None,
    ) -> None:
        """Call it after each step, before the next; as `begin`, if it was the last of a stop. If
        ranks leave after it, their successors get `live`, or load what `save_for_move` saves, by
        default `save`.
        """
        self._request.furthest = max(self._request.furthest, step)
        self._request.check_handlers()
        if self._agreement is None:
            self.begin(step, save)
        agreement = self._agreement
        if agreement is None or not agreement.is_last(step, self.grace_s):
            return
        if agreement.leave is not None and self._call is not None:
            save, limit_s = save_for_move or save, self.grace_s
            leave(agreement.leave, self._call, self._checkpointer, step, limit_s, save, live)
        self._exit(step, agreement.reason, save)

    def close(self, *, failed: bool = False) -> None:
        """This rank begins no more steps. `failed`: a fault has ended the training, or it is not
        known yet, and signals are kept for the next iteration.
        """
        self._closed = True
        leaves, self._leaves = self._leaves, None
        if leaves is not None:
            leaves.close()
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            self._request.detach(agreement)
        if not failed and self._request.user is self._user:
            if _present is not None and running_call() is not None:
                _present.release()  # the call keeps the request itself: it may be restarted
            else:
                _close_request()

    def _exit(self, step: int, reason: str, save: Callable[[], object]) -> None:
        first = self._ledger.rank == 0
        notice(log, "stopping after step %d: %s", step, reason, shown=first)
        self._checkpointer.emitter.emit(StopRequested(reason=reason))
        if self._call is not None:
            self._call.saving_for_stop(self.grace_s)
        with long_phase(2 * self.grace_s or None):
            save()
            self._checkpointer.wait(self.grace_s)
        furthest, done = self._request.furthest, f"step {step} is saved"
        if furthest > step:
            done += f"; the steps up to {furthest}, done before a fault, are lost"
            notice(log, done, shown=first)
        if self._call is not None:
            self._call.finish_stop(done)
        raise SystemExit(self._exit_code)


class StopRequest:
    """Turns signals into requests to stop, and passes a request on. One per process.

    Only a second SIGINT has its usual effect: a user who presses Ctrl-C twice does not want to
    wait. Any other signal may arrive twice, as from the scheduler and from the launcher.

    `call` is the wrapped call that it belongs to, `None` outside of one, and `furthest` the number
    of steps that this process has completed in it. `user` identifies the newest `StopSignals`: one
    from before a fault may be closed after that.
    """

    def __init__(self, call: RunningCall | None) -> None:
        self.call, self.furthest = call, 0
        self.user: object = None
        self._pid, self._exit_code = os.getpid(), 0
        self._reason: str | None = None
        self._agreement: Listener | None = None
        self._previous: dict[int, Any] = {}
        self._interrupted = self._warned = False
        # Protects `_reason` and `_agreement`: a request reaches the present agreement exactly once.
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._pass_on, name="outlast-stop", daemon=True)
        self._thread.start()

    def install(self, numbers: Iterable[int], exit_code: int) -> None:
        self._exit_code = exit_code
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "a signal ends this process without a save: only the main thread can handle one. "
                "job.stop() saves and stops the job from any thread"
            )
            return
        keep_signals_at_forks()
        for number in numbers:
            ignored = number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
            if number not in self._previous and not ignored:
                self._previous[number] = signal.signal(number, self._handle)
        self._note(self._previous)

    def check_handlers(self) -> None:
        """Says once which signal the program handles itself since: it may not arrive here."""
        for number in self._previous if not self._warned else ():
            # Others, as `asyncio.run`, take Ctrl-C for a while.
            if number == signal.SIGINT or signal.getsignal(number) == self._handle:
                continue
            self._warned = True
            log.warning(
                "the handler of %s was replaced after that of the job: a request to stop is not "
                "seen, unless the new handler calls the one before it, or job.stop()",
                signal_name(number),
            )
            return

    def request(self, reason: str) -> None:
        """Requests a stop. Safe to call from any thread and from a signal handler."""
        self._requests.put(reason)

    def attach(self, agreement: Listener) -> None:
        """Passes requests, also an earlier one, to this listener; closes one left by a fault."""
        with self._lock:
            before, self._agreement = self._agreement, agreement
            if self._reason is not None:
                agreement.request(self._reason)
        if before is not None:
            before.close()

    def detach(self, agreement: Listener) -> None:
        """Closes this agreement; requests are kept for the next one."""
        with self._lock:
            if self._agreement is agreement:
                self._agreement = None
        agreement.close()

    def release(self) -> None:
        """The training has ended without a fault: signals have their usual effect again."""
        self._note(())
        self.uninstall()

    def _note(self, numbers: Collection[int]) -> None:
        if self.call is not None and self.call.rank == 0:
            with contextlib.suppress(StoreError):  # of which the job learns elsewhere
                self.call.note_stop_signals(numbers, self._exit_code)

    def uninstall(self) -> None:
        # Not where other code has since installed its own handler.
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                _set_handler(number, previous)
        self._previous = {}

    def close(self) -> None:
        self.uninstall()
        self._requests.put(None)
        self._thread.join()
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and self._interrupted
        # The job goes on without this process, which hangs, or with a replacement.
        hangs = number == signal.SIGTERM and self.call is not None and self.call.terminated
        # A forked child, such as a worker of a data loader, has the handler but not the thread. The
        # end of a terminal reaches the whole process group, and its parent needs it up to the save.
        if number == signal.SIGHUP and os.getppid() == self._pid:
            return
        if again or hangs or os.getpid() != self._pid:
            _set_handler(number, self._previous.pop(number, signal.SIG_DFL))
            signal.raise_signal(number)
            return
        if number == signal.SIGHUP:
            leave_closed_terminal()
        self._interrupted = self._interrupted or number == signal.SIGINT
        self.request(f"signal {signal_name(number)}")

    def _pass_on(self) -> None:
        """In the thread: the store first, then the agreement."""
        while (reason := self._requests.get()) is not None:
            if self._reason is not None:
                continue
            if self.call is not None:
                where = f"rank {self.call.rank} on {socket.gethostname()}"
                try:
                    self.call.request_stop(f"{where}: {reason}", self._exit_code)
                except StoreError as e:
                    log.warning("the request to stop (%s) may not survive a restart: %s", reason, e)
            with self._lock:
                self._reason = reason
                if self._agreement is not None:
                    self._agreement.request(reason)


_present: StopRequest | None = None


def _present_request(call: RunningCall | None) -> StopRequest:
    """The request of this process: the same one for all iterations of a wrapped call."""
    global _present
    if _present is not None and _present.call is not call:
        _close_request()
    if _present is None:
        _present = StopRequest(call)
        if call is not None:
            call.at_end(_close_request)
    return _present


def _close_request() -> None:
    global _present
    request, _present = _present, None
    if request is not None:
        request.close()


def _set_handler(number: int, previous: Any) -> None:
    # `None`: the handler was not installed from Python, and cannot be installed again.
    signal.signal(number, previous if previous is not None else signal.SIG_DFL)
