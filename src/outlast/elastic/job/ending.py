"""How a job ends on one rank: it is told to stop, it is complete, or it has failed.

A completed state is not given up because a disk is full for a while: the last save is tried again
until a time limit. Before that, checkpoints that its commit would remove go. If there is a
fallback, it is tried too. One rank's clock and outcome hold for all: all try again, or none. A
pause is a wait for one key of the job's store, which a rank that is told to stop sets: all ranks
then try again at once, and go on for the grace time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from typing import NamedTuple, NoReturn

from outlast.async_checkpoint import Checkpointer
from outlast.coordination.stores.store import KeyTimeout
from outlast.elastic.job.fallback import Fallback
from outlast.elastic.job.live.choice import NOT_THE_SAME_STEPS
from outlast.elastic.job.live.rescue import newest_on_storage
from outlast.elastic.job.restoring import Restoring
from outlast.elastic.job.same_on_all_ranks import by_rank
from outlast.elastic.job.saves import Saves
from outlast.elastic.silent_faults.job_checks import JobChecks
from outlast.elastic.stop_signals import StopSignals
from outlast.errors import CheckpointError, RestartAbort, SaveCancelled, StoreError, UnevenRanks
from outlast.events.hung_ranks import EQUAL_STEPS
from outlast.inprocess.running_call import RunningCall, long_phase
from outlast.system.error_text import first_line
from outlast.system.units import duration_text

log = logging.getLogger("outlast.elastic")

LIMIT_S = 600.0
"""How long the last save of a completed training is tried."""
_LONGEST_PAUSE_S = 60.0
_BEFORE_FALLBACK = 3
"""So many attempts are made before the fallback is used, if there is time."""


class NotSaved(CheckpointError):
    """The last save of a job has failed for good: says what is in memory, and on storage."""


class Ending:
    """The end of one job. In a wrapped `call`, a fault is followed by a restart: signals are still
    requests then, and the state of the last step is kept. `released`: whether the job has ended
    without a fault that is followed by a restart.
    """

    def __init__(
        self,
        call: RunningCall | None,
        checkpointer: Checkpointer,
        checks: JobChecks,
        saves: Saves,
        restoring: Restoring,
        stop: StopSignals,
        fallback: Fallback | None,
    ) -> None:
        self._call, self._checkpointer, self._checks = call, checkpointer, checks
        self._saves, self._restoring, self._stop = saves, restoring, stop
        self._fallback = fallback
        self._timeout_s = checkpointer.session.writer.timeout_s or None
        self.released = False

    @functools.cached_property
    def _last_save(self) -> LastSave:
        """One, whatever was tried before: it counts the attempts."""
        return LastSave(self._saves, self._checkpointer, self._fallback, self._stop)

    def save_for_stop(self) -> None:
        """The last save of a job that was told to stop: as `complete`, within the grace time."""
        self._checks.compare_now(self._stop.grace_s)
        try:
            self._last_save.complete_stop(self._stop.grace_s)
        except NotSaved as e:
            self._not_saved(e)

    def complete(self) -> None:
        """The program has left the `with` block without an error: saves its state. Until this is
        done, nothing is released: after a fault, a restart in place continues with this state.

        Raises a `RestartAbort` in a wrapped call, and else a `CheckpointError`, if it cannot be
        saved; an `UnevenRanks` if the ranks have not made the same steps.
        """
        try:
            self._last_save.compare_steps()
            with long_phase(self._timeout_s):
                if self._saves.step:
                    self._checks.compare_now(self._stop.grace_s)
                self._checks.close()
        except Exception as e:
            self.fail(type(e))  # what the checks raise ends the job as an error of the program
            raise
        try:
            if self._saves.step:
                self._last_save.complete()
        except NotSaved as e:
            self._not_saved(e)
        with long_phase(self._timeout_s):
            self._checkpointer.close()
        self._release()

    def fail(self, kind: type[BaseException]) -> None:
        """The program has left the `with` block with an error."""
        if issubclass(kind, UnevenRanks):
            self._restoring.close(NOT_THE_SAME_STEPS)
        with long_phase(self._timeout_s):
            self._checks.close()
            if self._checkpointer.world_size == 1 and self._call and issubclass(kind, Exception):
                # No other rank can hold up the saves in progress; what is kept in memory stays, as
                # with several ranks: the next iteration continues from it.
                with contextlib.suppress(CheckpointError):  # it is in the log
                    self._checkpointer.wait(self._stop.grace_s)
                self._checkpointer.abort()
            else:
                self._checkpointer.__exit__(kind)

    def leave(self) -> None:
        """The last call at the end of the `with` block."""
        if self._call is None:
            self._release()

    def close(self) -> None:
        """Ends a job without a last save; a `CheckpointError` if a save failed."""
        self._checks.close()
        self._release()
        with long_phase(self._timeout_s):
            self._checkpointer.close()

    def _not_saved(self, error: NotSaved) -> NoReturn:
        self._checkpointer.__exit__(NotSaved)
        self._release()
        if self._call is None:
            raise error
        raise RestartAbort(str(error)) from error

    def _release(self) -> None:
        self.released = True
        self._restoring.close()
        self._stop.close()


class _Failed(NamedTuple):
    """Why an attempt at the last save has failed, as the first rank has told it to all."""

    cause: str
    left_s: float  # for further attempts
    told: str  # why a rank was told to stop since; empty if none was


class LastSave:
    """Saves the present state of a job before it ends. All ranks call its methods together."""

    def __init__(
        self,
        saves: Saves,
        checkpointer: Checkpointer,
        fallback: Fallback | None,
        stop: StopSignals,
    ) -> None:
        self._saves, self._checkpointer = saves, checkpointer
        self._fallback, self._stop = fallback, stop
        self._timeout_s = checkpointer.session.writer.timeout_s
        self._ledger = ledger = checkpointer.ledger.child("last-save")
        self._ended = ledger.child("ended")
        # A pause is a wait for what a rank says that is told to stop; or for what none ever says.
        self._told, self._never = ledger.round(0, "told"), ledger.round(0, "never")
        self._url, self._attempts = checkpointer.session.url, 0

    def compare_steps(self) -> None:
        """Training has ended here: waits for all ranks; an `UnevenRanks` on all if steps differ."""
        if not self._saves.has_trained:
            return
        with long_phase(self._timeout_s or None):
            places = self._checkpointer.ranks.exchange(self._saves.place)
        if len(set(places)) > 1:
            made = by_rank(places)
            raise UnevenRanks(f"the ranks have not made the same steps: {made}; {EQUAL_STEPS}")

    def complete(self) -> None:
        """Returns once the present state is committed: training is complete. After a request to
        stop, it is tried for the grace time. A `NotSaved` if the last attempt has failed, too; a
        `CheckpointError` if a fault of the job has ended the save, rather than the storage.
        """
        self._stop.attach(self)
        try:
            self._save(LIMIT_S)
        finally:
            self._stop.detach(self)

    def complete_stop(self, limit_s: float) -> None:
        """As `complete`, in the grace time of a stop; a `TimeoutError` if an attempt exceeds it."""
        self._save(limit_s, time.monotonic() + limit_s)

    def request(self, reason: str) -> None:
        """This rank is told to stop. In a thread of `StopRequest`."""
        with contextlib.suppress(StoreError):  # the end of the job, of which all ranks learn
            self._told.conclude(reason.encode())

    def close(self) -> None:
        """Nothing to do: see `StopRequest.detach`."""

    def _save(self, limit_s: float, deadline: float | None = None) -> None:
        ends, made, told, rank = time.monotonic() + limit_s, 0, "", self._checkpointer.rank
        while (found := self._attempt(ends, deadline)) is not None:
            made += 1
            cause, left_s = found.cause, found.left_s
            if found.told and not told:
                told, limit_s = found.told, self._stop.grace_s
                left_s = min(left_s, limit_s)
                ends = time.monotonic() + left_s
            if (not left_s or made >= _BEFORE_FALLBACK) and self._saved_in_fallback(cause):
                return
            if not left_s:
                raise NotSaved(self._what_is_where(made, cause, told)) from None
            pause_s = min(2.0 ** (made - 1), _LONGEST_PAUSE_S, limit_s / 12, left_s)
            if rank == 0:
                text = "the last save failed, and is tried again in %s, and for %s in all: %s"
                log.error(text, duration_text(pause_s), duration_text(left_s), cause)
            self._saves.failed()
            if rank == 0:
                with long_phase(left_s):  # it may read a checkpoint
                    self._checkpointer.saves.outcomes.make_room(self._saves.step, cause, ends)
            self._await_all()
            with long_phase(pause_s + self._timeout_s), contextlib.suppress(KeyTimeout):
                (self._never if told else self._told).pause(pause_s)

    def _attempt(self, ends: float, deadline: float | None) -> _Failed | None:
        """Waits for the commit; returns on all ranks why there is none, if one has failed."""
        self._attempts += 1
        limits = [self._timeout_s or None, deadline and max(deadline - time.monotonic(), 0.0)]
        # A rank that hangs in the save for a stop is found once the grace time is over.
        with long_phase(min(filter(None, limits), default=None)):
            error = self._error_of_save(deadline)
        found: _Failed | None = None
        if error is not None:
            left_s = max(ends - time.monotonic(), 0.0)
            told = (self._told.conclusion() or b"").decode()
            # The traceback of the writer follows in further lines, and is in the log.
            found = _Failed(first_line(error), left_s, told)
        outcome = json.loads(self._ledger.agree(f"{self._attempts}", json.dumps(found)))
        return None if outcome is None else _Failed(*outcome)

    def _error_of_save(self, deadline: float | None) -> CheckpointError | None:
        def left_s() -> float | None:
            return None if deadline is None else max(deadline - time.monotonic(), 0.0)

        try:
            self._checkpointer.wait(left_s())
        except CheckpointError as e:
            _raise_if_ending(e)
            log.debug("a save before the last one has failed: %s", e)
        # It may not be known on all ranks whether the checkpoint of this step is committed.
        key = f"{self._attempts}/before"
        is_saved = self._ledger.agree(key, str(self._saves.is_saved()))
        try:
            if is_saved != str(True):
                self._saves.save().wait(left_s())
        except CheckpointError as e:
            _raise_if_ending(e)
            return e
        return None

    def _saved_in_fallback(self, cause: str) -> bool:
        if self._fallback is None:
            return False
        with long_phase(self._timeout_s or None):
            error = self._fallback.save(self._saves)
        found = "" if error is None else first_line(error)
        problem = self._ledger.agree(f"{self._attempts}/fallback", found)
        url = self._fallback.url
        if self._checkpointer.rank == 0 and problem:
            log.error("nor can the last save be made in the fallback %s: %s", url, problem)
        elif self._checkpointer.rank == 0:
            text = "step %d, the last one, is saved in the fallback %s, where the same command "
            log.warning(text + "continues: %s", self._saves.step, url, cause)
        return not problem

    def _await_all(self) -> None:
        """Waits until this attempt has ended on all ranks: one whose part fails at once would use
        up its attempts while another still writes. If one is late, the next attempt says so.
        """
        with long_phase(self._timeout_s or None), contextlib.suppress(KeyTimeout):
            ended = self._ended.next()
            ended.finish()
            ended.await_verdict(self._timeout_s)

    def _what_is_where(self, attempts: int, cause: str, told: str) -> str:
        newest = newest_on_storage(self._checkpointer)
        ended = f", the last ones after a request to stop ({told})" if told else ""
        then = "the same command continues there"
        then += "" if self._fallback else " (Job(fallback=DIR) names a second folder)"
        return (
            f"step {self._saves.step}, the last one, is in memory only: {attempts} attempts to "
            f"save it failed{ended}. On storage in {self._url}: {newest}; {then}. "
            f"The failure: {cause}"
        )


def _raise_if_ending(error: CheckpointError) -> None:
    """Raises an error of a fault, after which the ranks do not try again together."""
    if isinstance(error, SaveCancelled | UnevenRanks) or isinstance(error.__cause__, StoreError):
        raise error
