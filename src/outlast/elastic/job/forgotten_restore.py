"""Refuses to replace the checkpoints of a run that a job does not continue."""

from __future__ import annotations

from outlast.async_checkpoint import Checkpointer
from outlast.coordination.call_ledger import CallLedger


def check_nothing_to_restore(
    checkpointer: Checkpointer, ledger: CallLedger, path: str, steps: int
) -> None:
    """Checks that a job after `steps` steps, which has restored nothing, continues what is in its
    folder: there is no checkpoint of a later step. All ranks call this, and agree.

    Raises:
        ValueError: names the folder, the newest step, and what to call.
    """
    newest = max((info.step for info in checkpointer.checkpoints()), default=0)
    # One rank's answer holds for all: a save may already have begun when another rank looks.
    newest = int(ledger.agree("newest-unrestored", str(newest)))
    if newest > steps:
        raise ValueError(
            f"{path} has checkpoints up to step {newest}, and this job is at step {steps}, because "
            "restore() was not called: its saves would replace them. Call job.restore() before the "
            "first step. To start over, use another folder, or delete the checkpoints first "
            "(outlast checkpoint rm)"
        )
