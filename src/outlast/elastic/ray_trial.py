"""Saves and loads inside a Ray Tune trial, which use the trial's checkpoint.

A trial reports a checkpoint together with metrics; Ray copies it to the experiment's storage, and
to the machine on which the trial continues. So in a trial, `save_all_states` makes a report, and a
trial that Ray's schedulers pause, clone or restart finds its states. A trial here is a function
passed to `ray.tune.Tuner`, in one process.

This module does not import Ray unless the process has already imported it, as every trial has.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any


def in_trial() -> bool:
    """Whether this process runs a Ray Tune trial."""
    functions = sys.modules.get("ray.tune.trainable.trainable_fn_utils")
    session = getattr(functions, "get_session", None)
    if session is None:
        return False
    found = session()
    # A Ray Train worker has a rank; a Ray Tune trial does not.
    return found is not None and getattr(found, "world_rank", None) is None


@contextlib.contextmanager
def opened() -> Iterator[str | None]:
    """The folder of the trial's checkpoint, which exists until the block ends; `None` if the trial
    has no checkpoint.
    """
    checkpoint = _tune().get_checkpoint()
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as folder:
        yield os.fspath(folder)


def report(folder: str, metrics: Mapping[str, Any]) -> str:
    """Reports the contents of `folder` as the trial's checkpoint; returns when Ray has stored it.

    Returns:
        The path of the stored checkpoint.
    """
    tune = _tune()
    tune.report(dict(metrics), checkpoint=tune.Checkpoint.from_directory(folder))
    return str(tune.get_checkpoint().path)


def _tune() -> Any:
    from ray import tune

    return tune
