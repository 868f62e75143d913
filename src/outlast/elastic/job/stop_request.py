"""The request to stop in this process: from a signal or `Job.stop` to the ranks of the job.

A request outlives the iteration in which it arrives, because a restart in place must not lose it.
It is kept in three places, each for a different loss:

- *This process.* The signal handlers and the request live as long as the wrapped call, so a signal
  between two iterations, or during `Job.restore`, is not lost: the next `Job` of this process
  passes the request on when it starts to listen.
- *The store of the call.* A thread writes the request there before it asks the ranks of the present
  iteration to agree on a last step. So once any rank acts on a request, every later decision on a
  next iteration reads it, even if this process is killed. That iteration is then the last one
  (`ViewRecord.with_stop`): its `Job` saves what only memory has, and all ranks leave.
- *The agreement of the iteration* (`preemption.py`), which stops all ranks after the same step. A
  fault ends it; the other two remain.

A fault may end the iteration before the request is in the store. Then the decision does not contain
it, and the next `Job` of this process starts a new agreement.

A signal handler only puts a value into a `SimpleQueue`: that is safe wherever the main thread is.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from outlast.elastic.job.preemption import StopAgreement
from outlast.errors import StoreError
from outlast.inprocess.running_call import RunningCall, running_call
from outlast.system.error_text import signal_name

log = logging.getLogger("outlast.elastic")


class StopRequest:
    """Turns signals into requests to stop, and passes a request on. One per process.

    Only a second SIGINT has the effect that it would have without the handlers: a user who presses
    Ctrl-C twice does not want to wait. Any other signal may arrive twice, for example from the
    scheduler and from the launcher; the second is the same request.

    Attributes:
        call: the wrapped call that it belongs to; `None` outside of wrapped functions.
        furthest: the number of steps that this process has completed in this call.
    """

    def __init__(self, call: RunningCall | None) -> None:
        self.call = call
        self._pid = os.getpid()
        self._exit_code = 0
        self._reason: str | None = None
        self._agreement: StopAgreement | None = None
        self._previous: dict[int, Any] = {}
        self._interrupted = False
        self.furthest = 0
        # Protects `_reason` and `_agreement`: a request reaches the present agreement exactly once.
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._pass_on, name="outlast-stop", daemon=True)
        self._thread.start()

    def install(self, numbers: Iterable[int], exit_code: int) -> None:
        """Installs handlers for these signals, if this is the main thread."""
        self._exit_code = exit_code
        if threading.current_thread() is not threading.main_thread():
            log.info("signals are ignored: only the main thread can install handlers")
            return
        for number in numbers:
            if number not in self._previous:
                self._previous[number] = signal.signal(number, self._handle)

    def request(self, reason: str) -> None:
        """Requests a stop. Safe to call from any thread and from a signal handler."""
        self._requests.put(reason)

    def attach(self, agreement: StopAgreement) -> None:
        """Passes requests to this agreement, including one that has arrived before."""
        with self._lock:
            self._agreement = agreement
            if self._reason is not None:
                agreement.request(self._reason)

    def detach(self, agreement: StopAgreement) -> None:
        """Passes requests to this agreement no longer: they are kept for the next one."""
        with self._lock:
            if self._agreement is agreement:
                self._agreement = None

    def uninstall(self) -> None:
        """Restores the previous handlers, except where other code has since installed its own."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:
                _set_handler(number, previous)
        self._previous = {}

    def close(self) -> None:
        """Restores the handlers and ends the thread."""
        self.uninstall()
        self._requests.put(None)
        self._thread.join()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGINT and self._interrupted
        # The job goes on without this process, which hangs, or with a replacement.
        hangs = number == signal.SIGTERM and self.call is not None and self.call.terminated
        # A forked child, such as a worker of a data loader, has the handler but not the thread.
        if again or hangs or os.getpid() != self._pid:
            _set_handler(number, self._previous.pop(number, signal.SIG_DFL))
            signal.raise_signal(number)
            return
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


def present_request() -> StopRequest:
    """The request of this process: the same one for all jobs of a wrapped call."""
    global _present
    call = running_call()
    if _present is not None and _present.call is not call:
        close_request()
    if _present is None:
        _present = StopRequest(call)
        if call is not None:
            call.at_end(close_request)
    return _present


def close_request() -> None:
    """Ends the request of this process, if there is one."""
    global _present
    request, _present = _present, None
    if request is not None:
        request.close()


def release_request() -> None:
    """Call when a job has ended without a fault: signals have their usual effect again. A wrapped
    call keeps the request itself: it may still be restarted.
    """
    if _present is not None and running_call() is not None:
        _present.uninstall()
    else:
        close_request()


def _set_handler(number: int, previous: Any) -> None:
    # `None`: the handler was not installed from Python, and cannot be installed again.
    signal.signal(number, previous if previous is not None else signal.SIG_DFL)
