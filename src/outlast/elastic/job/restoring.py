"""Restores the state of a job: from the ranks that have survived a fault, or from a checkpoint."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from outlast.async_checkpoint import Checkpointer
from outlast.coordination.collectives import least
from outlast.elastic.job.counters import Counters, check_counters
from outlast.elastic.job.live.decision import Decision
from outlast.elastic.job.live.restore import LiveState
from outlast.elastic.job.training_state import TrainingState
from outlast.elastic.wrapped_modules import with_old_names
from outlast.errors import CheckpointError

_NO_RANK = 1 << 62


class Restoring:
    """One rank's part in the restores of a job. `live` is the state of the surviving ranks, `None`
    if the job does not keep it.
    """

    def __init__(
        self,
        training: TrainingState,
        counters: Counters,
        checkpointer: Checkpointer,
        live: LiveState | None,
        group: Any,
    ) -> None:
        self._training, self._counters = training, counters
        self._checkpointer, self._live, self._group = checkpointer, live, group
        self._from: Decision | None = None

    def restore(self, step: int | None) -> int | None:
        """Restores the newest state, or the checkpoint of `step`. Returns the number of its steps,
        or `None` if there is none: everything is then as before.

        Raises:
            Exception: as `Job.restore` describes.
        """
        decision = None if self._live is None else self._live.decide(step)
        if decision is not None and self._from_survivors(decision):
            self._from = decision
            return self._counters.steps
        self._from = None
        return self._from_checkpoint(step)

    @property
    def from_survivors(self) -> bool:
        """Whether the last restore was from the ranks that survived a fault."""
        return self._from is not None

    def done(self) -> None:
        """The job continues from what was restored, or from its initial state. From now on, the
        state of each step is noted. Collective.
        """
        self._training.buckets.apply()
        if self._live is not None:
            self._live.begin(self._from, self._counters.live_state_dict())

    def _from_survivors(self, decision: Decision) -> bool:
        assert self._live is not None
        began = time.monotonic()
        collected = self._live.collect(decision)
        if collected is None:
            return False
        state, received_bytes = collected
        self._load_on_all_ranks(state)
        source = "replica" if self._checkpointer.rank in decision.sources else "live"
        seconds = time.monotonic() - began
        self._checkpointer.kept.restored(
            self._training.state_dict(), decision.step, source, seconds, received_bytes
        )
        self._live.log(decision, seconds)
        return True

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
            self._training.load_state_dict(state, started=int(state["counters"]["steps"]) > 0)
            self._counters.load_state_dict(state["counters"])
        except Exception as e:  # noqa: BLE001 - raised below, when the other ranks know of it
            error = e
        rank = self._checkpointer.rank
        first = least(_NO_RANK if error is None else rank, self._group)
        if error is not None:
            raise error
        if first != _NO_RANK:
            raise CheckpointError(f"rank {first} could not load its state: see its own error")
