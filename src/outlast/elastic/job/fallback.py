"""The fallback of a job: a second folder, for the last save when the first one keeps failing."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from outlast.async_checkpoint import Checkpointer
from outlast.elastic.job.saves import Saves
from outlast.elastic.job.training_state import TrainingState
from outlast.errors import CheckpointError, CheckpointMismatch, CheckpointReadError
from outlast.events.emitter import NullSink

log = logging.getLogger("outlast.elastic")


class Fallback:
    """One rank's part. All ranks call its methods together.

    The checkpoints are in a folder in `folder` that is named after the job's own (`url`): several
    jobs may have the same fallback, and none restores the state of another.
    """

    def __init__(
        self, folder: str | os.PathLike[str], checkpointer: Checkpointer, group: Any
    ) -> None:
        self._checkpointer, self._group, self._rank = checkpointer, group, checkpointer.rank
        self.lacking: list[tuple[Any, ...]] = []  # as `Restorer.lacking`
        own = self._own_url = checkpointer.session.url
        name = f"{PurePath(own).name}-{hashlib.sha256(own.encode()).hexdigest()[:8]}"
        self.url = f"{os.fspath(folder).rstrip('/')}/{name}"

    def save(self, saves: Saves) -> CheckpointError | None:
        """Saves the present state here; returns why that failed."""
        try:
            with self._open() as checkpointer:
                saves.save_to(checkpointer).wait()
        except CheckpointError as e:
            return e
        return None

    def restore(self, state: dict[str, Any], step: int | None, optional: Any) -> int | None:
        """Loads a checkpoint into `state`, if the newest is here, or the one of `step` only here;
        returns its step. One that is damaged is passed over, with a warning: the other folder has
        an older one. A `CheckpointError` if this folder cannot be used, or as
        `Checkpointer.restore`, if the checkpoint does not fit, or cannot be read now.
        """
        with self._open() as checkpointer:
            found, restorer = checkpointer.restorer.newest(-1, step), self._checkpointer.restorer
            if found is None or restorer.newest(found - 1, step) is not None:
                return None
            began, shown = time.monotonic(), logging.WARNING if self._rank == 0 else logging.DEBUG
            text = "continuing after step %d in the fallback %s, newer than what is in %s"
            log.log(shown, text, found, self.url, self._own_url)
            try:
                checkpointer.restore(state, step=found, optional=optional)
                self.lacking = checkpointer.restorer.lacking
            except (CheckpointMismatch, CheckpointReadError):
                raise
            except CheckpointError as e:
                text = "passed over the checkpoint of step %d in the fallback %s: %s"
                log.log(shown, text, found, self.url, e)
                return None
        restorer.restored_elsewhere(found, "storage", time.monotonic() - began, 0)
        self._checkpointer.saves.prepare(lambda: state)
        return found

    def _open(self) -> Checkpointer:
        timeout_s = self._checkpointer.session.writer.timeout_s
        options = {"group": self._group, "timeout": timeout_s, "events": NullSink()}
        return Checkpointer(self.url, keep=1, **options)


def load_checkpoint(
    training: TrainingState,
    checkpointer: Checkpointer,
    fallback: Fallback | None,
    step: int | None,
    load: Callable[[dict[str, Any]], object],
) -> int | None:
    """Passes the newest checkpoint, or the one of `step`, to `load`, from the fallback if it is
    newer there; returns its step. If there is none, or with an error, all is as before.
    """
    found: int | None = None
    if fallback is None and checkpointer.restorer.has_none(step):
        # A new job: nothing to fill, and nothing to undo, which would load all of the state anew.
        return checkpointer.restorer.restore({}, step)
    backup = training.backup()
    try:
        state, optional = training.load_target()
        lacking: list[tuple[Any, ...]] = []
        if fallback is not None:
            found = fallback.restore(state, step, optional)
            lacking = fallback.lacking
            if found is None:  # what was loaded before damage was found counts no more
                state, optional = training.load_target()
        if found is None:
            found = checkpointer.restore(state, step=step, optional=optional)
            lacking = checkpointer.restorer.lacking
        if found is not None:
            training.drop_moments(state, lacking)
            load(state)
    except Exception:
        training.roll_back(backup)
        raise
    if found is None:
        training.roll_back(backup)
    return found
