"""Inside a Ray Tune trial, the checkpoint is the trial's own.

Ray gives a trial its checkpoint, and takes one with a report of metrics: it copies it to the
storage of the experiment, and brings it to wherever the trial goes on. So `save_all_states` is a
report there, and what Ray's schedulers pause, clone or start again finds its states. Of what is
written here, one trial of one process is meant: a function that was given to `ray.tune.Tuner`.

Ray is imported if the process has it imported already, as every trial has, and never before.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["in_trial", "opened", "report"]


def in_trial() -> bool:
    """Whether this is inside a function that Ray Tune runs as a trial."""
    functions = sys.modules.get("ray.tune.trainable.trainable_fn_utils")
    session = getattr(functions, "get_session", None)
    if session is None:
        return False
    found = session()
    # A worker of Ray Train has a rank, a trial of Ray Tune has none.
    return found is not None and getattr(found, "world_rank", None) is None


@contextlib.contextmanager
def opened() -> Iterator[str | None]:
    """The folder of the trial's checkpoint, which is there within the block; `None` if the trial
    has none.
    """
    checkpoint = _tune().get_checkpoint()
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as folder:
        yield os.fspath(folder)


def report(folder: str, metrics: Mapping[str, Any]) -> str:
    """Gives the trial a checkpoint: what lies in `folder`. Returns when Ray has stored it.

    Returns:
        Where it is now.
    """
    tune = _tune()
    tune.report(dict(metrics), checkpoint=tune.Checkpoint.from_directory(folder))
    return str(tune.get_checkpoint().path)


def _tune() -> Any:
    from ray import tune

    return tune
