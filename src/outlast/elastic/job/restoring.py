"""Restores the state of a job: from the ranks that have survived a fault, or from a checkpoint."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

from outlast.async_checkpoint import Checkpointer
from outlast.coordination.call_ledger import CallLedger
from outlast.elastic.job.counters import Counters, check_counters
from outlast.elastic.job.live.choice import Choice, names
from outlast.elastic.job.live.live_state import LiveState
from outlast.elastic.job.same_on_all_ranks import first_rank
from outlast.elastic.job.training_state import TrainingState
from outlast.elastic.wrapped_modules import with_old_names
from outlast.errors import CheckpointError
from outlast.inprocess.running_call import RunningCall
from outlast.system.notices import notice
from outlast.system.units import duration_text

log = logging.getLogger("outlast.elastic")


class Restoring:
    """One rank's part in the restores of a job. With a wrapped `call`, it also notes the state of
    each step, from which the next iteration of the call continues.

    Attributes:
        from_survivors: whether the last restore was from the ranks that survived a fault.
    """

    def __init__(
        self,
        training: TrainingState,
        counters: Counters,
        checkpointer: Checkpointer,
        ledger: CallLedger,
        group: Any,
        call: RunningCall | None,
    ) -> None:
        self._training, self._counters = training, counters
        self._checkpointer, self._kept, self._group = checkpointer, checkpointer.kept, group
        self._live: LiveState | None = None
        if call is not None:
            self._live = LiveState(training, self._kept, ledger.child("live"), group, call)
        self._choice: Choice | None = None

    @property
    def from_survivors(self) -> bool:
        return self._choice is not None

    def restore(self, step: int | None) -> int | None:
        """Restores the newest state, or the checkpoint of `step`. Returns the number of its steps,
        or `None` if there is none: everything is then as before.

        The candidates are the newest step that the ranks have in their memory, and the checkpoints:
        in memory, in that of another host, and on storage, of which the checkpointer takes the
        newest valid one. The ranks' own is taken unless a checkpoint is newer or is required, or
        its parts cannot be collected.

        Raises:
            Exception: as `Job.restore` describes.
        """
        self._choice = None
        found = "" if self._live is None else self._live.newest()
        if isinstance(found, Choice):
            newer = None
            if step is None:
                # A checkpoint of a later step exists only if all ranks have completed that step,
                # and have lost it since. If it turns out to be damaged, an older one is loaded.
                newer = self._kept.newest(found.step)
            if step is not None:
                found = f"the checkpoint of step {step} is required"
            elif newer is not None:
                found = f"the ranks are at step {found.step}, and a checkpoint at step {newer}"
            else:
                found = self._from_survivors(found)
        if isinstance(found, Choice):
            self._choice = found
            return self._counters.steps
        self._kept.not_live = found
        if found and self._checkpointer.rank == 0:
            log.warning("the state of the surviving ranks is not used: %s", found)
        return self._from_checkpoint(step)

    def begin(self) -> None:
        """The job continues from what was restored, or from its initial state. From now on, the
        state of each step is noted. Collective.
        """
        self._training.buckets.apply()
        if self._live is not None:
            self._live.begin(self._choice, self._counters.live_state_dict())

    def completed(self) -> None:
        """A step is complete: notes the state of the job."""
        if self._live is not None:
            self._live.completed(self._counters.steps, self._counters.live_state_dict())

    def close(self) -> None:
        """The job has ended without a fault: nothing is kept."""
        if self._live is not None:
            self._live.close()

    def _from_survivors(self, choice: Choice) -> Choice | str:
        """Loads this state of the ranks; returns why that failed otherwise."""
        assert self._live is not None
        began = time.monotonic()
        collected = self._live.collect(choice)
        if isinstance(collected, str):
            return collected
        state, received_bytes = collected
        self._load_on_all_ranks(state)
        source = "replica" if self._checkpointer.rank in choice.sources else "live"
        seconds = time.monotonic() - began
        self._kept.restored(
            self._training.state_dict(), choice.step, source, seconds, received_bytes
        )
        if self._checkpointer.rank == 0:
            received = sorted(choice.sources)
            how = f"; {names(received)} received it from others" if received else ""
            notice(
                log,
                "continuing after step %d with the state of the surviving ranks%s (%s)",
                choice.step,
                how,
                duration_text(seconds),
            )
        return choice

    def _from_checkpoint(self, step: int | None) -> int | None:
        backup, counters = self._training.backup(), self._counters.state_dict()
        try:
            state, optional = self._training.load_target()
            state["counters"] = dict(counters)
            read = partial(self._checkpointer.restore, step=step, optional=optional)
            found = with_old_names(read, state)
            if found is not None:
                self._load_on_all_ranks(state)
        except Exception:
            self._training.roll_back(backup)
            self._counters.load_state_dict(counters)
            raise
        if found is None:
            self._training.roll_back(backup)
        return found

    def _load_on_all_ranks(self, state: dict[str, Any]) -> None:
        """Loads the restored state; if one rank cannot, raises on all ranks: the others would wait
        for that rank in their next collective.
        """
        error: Exception | None = None
        try:
            check_counters(state["counters"])
            self._training.load_state_dict(state, int(state["counters"]["steps"]))
            self._counters.load_state_dict(state["counters"])
        except Exception as e:  # noqa: BLE001 - raised below, when the other ranks know of it
            error = e
        first = first_rank(error is not None, self._checkpointer.rank, self._group)
        if error is not None:
            raise error
        if first is not None:
            raise CheckpointError(f"rank {first} could not load its state: see its own error")
