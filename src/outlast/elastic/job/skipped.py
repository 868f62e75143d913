"""The batches that a job leaves out, after values were found that are not finite.

When they are found, the position in the data is recorded beside the checkpoints. The restart goes
back to a finite checkpoint, and what lies between its position and the recorded one is left out, as
if the loop had met it with `continue`. Steps count what was trained. A position is compared, not
counted down, and is part of the job's state, since the record is removed once that is saved.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any, NoReturn

import msgspec

from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.trust import limit_trust, skip_on_record
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import KeyTimeout
from outlast.elastic.data.loader import ElasticLoader
from outlast.elastic.job.counters import Counters
from outlast.elastic.job.epochs import Epochs
from outlast.elastic.job.parts import Part
from outlast.errors import CheckpointError, NonFinite, SkipBatches
from outlast.events.emitter import Emitter
from outlast.events.types import BatchesSkipped

log = logging.getLogger("outlast.elastic")

_WRITTEN_S = 60.0


@dataclasses.dataclass(frozen=True)
class Skip:
    """The batches up to a position are left out."""

    found: int = 0  # the step after which values were not finite
    times: int = 0  # how often in a row this is done
    samples: int | None = None  # how many were trained on up to there, on all ranks, if known
    loader: tuple[int, int] | None = None  # the epoch of the `ElasticLoader`, the position in it
    # By epoch, how many batches of each `Job.batches` were done.
    epochs: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _State:
    skip: Skip = dataclasses.field(default_factory=Skip)
    steps: int = 0  # those of which the batches were left out
    samples: int | None = 0


class SkippedBatches(Part):
    """Those of one job, on one rank. `most`: how often in a row; `None`: never."""

    in_place = False

    def __init__(self, loader: Any, epochs: Epochs, counters: Counters, most: int | None) -> None:
        self._loader = loader if isinstance(loader, ElasticLoader) else None
        self._epochs, self._counters, self._most = epochs, counters, most
        self._state = _State()
        epochs.may_leave_out = most is not None

    def check_known(self) -> None:
        """A `ValueError`, after a step, if the job does not know the batches."""
        if self._most is not None and self._loader is None and not self._epochs.counts_batches:
            raise ValueError(
                "on_non_finite='skip': the job does not know which batches to leave out. Pass an "
                "ElasticLoader to Job(loader=...), or iterate a DataLoader without a state of its "
                "own with job.batches()"
            )

    def go_back(
        self, checkpointer: Checkpointer, ledger: CallLedger, step: int, why: str
    ) -> NoReturn:
        """Records that the job goes back to the checkpoint of `step`, and leaves out all batches up
        to the present one. Any rank may call this, at about the same step: one record holds. Then
        raises `SkipBatches`; or `NonFinite`, if this was done too often in a row, or cannot be
        recorded.
        """
        assert self._most is not None
        before, found = self._state.skip, self._counters.steps
        try:
            recorded = skip_on_record(checkpointer)
            if recorded is not None:  # and not followed, as by restore(step=...)
                before = msgspec.convert(recorded, Skip, strict=False)
            times = before.times + 1 if found <= before.found else 1
            samples, done = self._counters.known_samples, self._epochs.batches_done()
            skip = Skip(found, times, samples, self._position, done)
            own = {"rank": ledger.rank, "step": step, "skip": dataclasses.asdict(skip)}
            first = json.loads(ledger.agree("skip", json.dumps(own)))
            times, step = first["skip"]["times"], first["step"]
            if times > self._most:
                raise NonFinite(
                    f"{why}. The job ends: batches were left out {self._most} times in a row, and "
                    f"no later step than {before.found} was made (max_skips)"
                )
            if first["rank"] == ledger.rank:
                limit_trust(checkpointer, step, why, first["skip"])
                ledger.round(1).conclude(b"written")
            else:  # a restart before that would interrupt the other rank
                ledger.round(1).await_conclusion(_WRITTEN_S)
        except (CheckpointError, KeyTimeout, OSError, msgspec.ValidationError) as e:
            raise NonFinite(
                f"{why}. The job ends: which batches to leave out could not be recorded: {e}"
            ) from e
        raise SkipBatches(
            f"{why}. The job goes back to step {step}, and leaves out the batches of steps "
            f"{step + 1} to {first['skip']['found']} (time {times} of {self._most} in a row)"
        )

    def leave_out(self, record: dict[str, Any], emitter: Emitter, rank: int) -> None:
        """Leaves out what was recorded, after the restore; a `CheckpointError` if it is invalid."""
        try:
            skip = msgspec.convert(record, Skip, strict=False)
        except msgspec.ValidationError as e:
            raise CheckpointError(
                f"the record of the batches to leave out, trust/limit.json beside the checkpoints, "
                f"cannot be read: {e}. Without that file, none is left out"
            ) from e
        step, known, before = self._counters.steps, self._counters.known_samples, self._state
        steps = skip.found - step
        samples = None if skip.samples is None or known is None else skip.samples - known
        if skip != before.skip:  # else the state was saved, but the record not removed yet
            total = None if samples is None or before.samples is None else before.samples + samples
            self._set(_State(skip, before.steps + steps, total))
        if rank == 0:
            log.warning(
                "after step %d, values were not finite: training goes back to step %d, and the %s "
                "of the steps between are left out",
                skip.found,
                step,
                "batches" if samples is None else f"{samples} samples",
            )
            number = -1 if samples is None else samples
            emitter.emit(
                BatchesSkipped(step=step, found=skip.found, samples=number, times=skip.times)
            )

    def say_at_end(self, rank: int) -> None:
        """The job is complete: says what it lacks."""
        if self._state.steps and rank == 0:
            log.warning(
                "training is complete without the batches of %d steps%s: with them, values were "
                "not finite",
                self._state.steps,
                "" if self._state.samples is None else f" ({self._state.samples} samples)",
            )

    def save(self) -> dict[str, Any]:
        return self.shared()

    def shared(self) -> dict[str, Any]:
        """Empty if nothing was left out."""
        if self._state == _State():
            return {}
        return {"state": (json.dumps(dataclasses.asdict(self._state)),)}

    def load(self, state: Any, steps: int) -> None:
        found = json.loads(state["state"][0]) if state else {}
        self._set(msgspec.convert(found, _State, strict=False))

    @property
    def _position(self) -> tuple[int, int] | None:
        if self._loader is None:
            return None
        here = self._loader.sampler.epoch, self._loader.sampler.position
        return max(here, self._state.skip.loader or here)

    def _set(self, state: _State) -> None:
        self._state = state
        self._epochs.left_out = state.skip.epochs
        if self._loader is not None:
            self._loader.left_out = state.skip.loader
