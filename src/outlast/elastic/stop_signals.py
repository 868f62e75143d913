"""`StopSignals`: a training that is told to stop saves, and ends, as a `Job` does.

For adapters of frameworks that have a `Checkpointer`, and no `Job`.
"""

from __future__ import annotations

import datetime
import logging
import signal
from collections.abc import Callable, Iterable
from typing import Any

from outlast.async_checkpoint import Checkpointer
from outlast.coordination.call_ledger import connect_ledger
from outlast.elastic.job.preemption import StopAgreement
from outlast.elastic.job.stop_request import present_request, release_request
from outlast.events import StopRequested
from outlast.inprocess.running_call import long_phase, running_call
from outlast.system.arguments import Duration, as_timedelta
from outlast.system.notices import notice

log = logging.getLogger("outlast.elastic")

_open: StopSignals | None = None


class StopSignals:
    """Handles the signals from `begin` to `close`. All ranks create one, and call the same methods.

    A fault may leave it open: the next one, in the next iteration, closes it.

    Args:
        checkpointer: through which the training saves.
        signals: the signals on which to save and exit. A second SIGINT has its usual effect.
        grace: how long the last save may take.
        exit_code: the exit code of a training that was told to stop.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        group: Any = None,
        *,
        signals: Iterable[int] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
        grace: Duration = datetime.timedelta(seconds=30),
        exit_code: int = 143,
    ) -> None:
        global _open
        if _open is not None:
            _open.close(failed=True)
        self._grace = as_timedelta("grace", grace, allow_zero=True)
        self._checkpointer, self._exit_code = checkpointer, exit_code
        self._call, self._ledger = running_call(), connect_ledger("stop", group)
        self._agreement: StopAgreement | None = None
        self._request = present_request()
        self._request.install(tuple(signals), exit_code)
        _open = self
        if self._call is not None:
            self._call.at_end(self.close)

    def begin(self, step: int, save: Callable[[], object]) -> None:
        """Call it when the state after `step` is restored, or at the start of the training.

        Raises:
            SystemExit: if the training was told to stop before a restart in place; `save` was
                called, and its save is committed.
        """
        if self._call is not None and self._call.stop is not None:
            self._exit(step, self._call.stop.reason, save)
        self._agreement = StopAgreement(self._ledger, step + 1)
        self._request.attach(self._agreement)

    def completed(self, step: int, save: Callable[[], object]) -> None:
        """Call it after each step, before the next one begins.

        Raises:
            SystemExit: if a rank was told to stop, and this was the last step; as `begin`.
        """
        self._request.furthest = max(self._request.furthest, step)
        agreement = self._agreement
        if agreement is not None and agreement.is_last(step, self._grace.total_seconds()):
            self._exit(step, agreement.reason, save)

    def close(self, *, failed: bool = False) -> None:
        """Ends the handling of the signals; `failed`: a fault has ended the training, and signals
        are kept for the next iteration.
        """
        global _open
        if _open is not self:
            return
        _open = None
        if self._agreement is not None:
            self._request.detach(self._agreement)
            self._agreement.close()
        if not failed:
            release_request()

    def _exit(self, step: int, reason: str, save: Callable[[], object]) -> None:
        notice(log, "stopping after step %d: %s", step, reason, shown=self._ledger.rank == 0)
        self._checkpointer.emitter.emit(StopRequested(reason=reason))
        grace = self._grace.total_seconds()
        if self._call is not None:
            self._call.saving_for_stop(grace)
        with long_phase(2 * grace or None):
            save()
            self._checkpointer.wait(self._grace)
        if self._call is not None:
            self._call.finish_stop(f"step {step} is saved")
        raise SystemExit(self._exit_code)
