"""What the launcher says of this process: the only module of this package that reads `os.environ`,
and that finds out whether the process runs a Ray Tune trial.

Each value comes from the first variable that is set and not empty: outlast's, the torch launcher's,
or AdaptDL's. Values are not cached, because a restart in place may change them.

A trial is a function passed to `ray.tune.Tuner`, in one process, which has already imported Ray. It
reports a checkpoint together with metrics; Ray copies it to the experiment's storage, and to the
machine on which the trial continues. So in a trial, `save_all_states` makes a report, and a trial
that Ray's schedulers pause, clone or restart finds its states.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["checkpoint_path", "from_ray", "num_replicas", "num_restarts", "replica_rank"]

_PATH = ("OUTLAST_CHECKPOINT_PATH", "ADAPTDL_CHECKPOINT_PATH")
_RANK = ("OUTLAST_REPLICA_RANK", "RANK", "ADAPTDL_REPLICA_RANK")
_REPLICAS = ("OUTLAST_NUM_REPLICAS", "WORLD_SIZE", "ADAPTDL_NUM_REPLICAS")
_RESTARTS = ("OUTLAST_NUM_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "ADAPTDL_NUM_RESTARTS")


def checkpoint_path() -> str | None:
    """The folder of the checkpoints; `None` if it is not set: nothing is saved or loaded then."""
    return _first(_PATH)[1] or None


def replica_rank() -> int:
    """The rank of this replica; 0 if no variable is set. A `ValueError` names the variable that is
    not a number, or out of range.
    """
    return _place()[0]


def num_replicas() -> int:
    """The number of replicas of the job; 1 if no variable is set. A `ValueError` as
    `replica_rank`.
    """
    return _place()[1]


def num_restarts() -> int:
    """How many times the job has been restarted; 0 if no variable is set. A `ValueError` names the
    variable that is not a number, or negative.
    """
    variable, restarts = _number(_RESTARTS, 0)
    if restarts < 0:
        raise ValueError(f"{variable}={restarts} must be at least 0")
    return restarts


def from_ray() -> bool:
    """Whether this process runs a Ray Tune trial. States are then saved to and loaded from the
    trial's checkpoint, and `checkpoint_path()` is ignored.
    """
    functions = sys.modules.get("ray.tune.trainable.trainable_fn_utils")
    session = getattr(functions, "get_session", None)
    if session is None:
        return False
    found = session()
    # A Ray Train worker has a rank; a Ray Tune trial does not.
    return found is not None and getattr(found, "world_rank", None) is None


@contextlib.contextmanager
def opened_trial() -> Iterator[str | None]:
    """The folder of the trial's checkpoint, which exists until the block ends; `None` if the trial
    has no checkpoint.
    """
    checkpoint = _tune().get_checkpoint()
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as folder:
        yield os.fspath(folder)


def report_to_trial(folder: str, metrics: Mapping[str, Any]) -> str:
    """Reports `folder` as the trial's checkpoint; returns its path once Ray has stored it."""
    tune = _tune()
    tune.report(dict(metrics), checkpoint=tune.Checkpoint.from_directory(folder))
    return str(tune.get_checkpoint().path)


def _tune() -> Any:
    from ray import tune

    return tune


def _place() -> tuple[int, int]:
    rank_from, rank = _number(_RANK, 0)
    replicas_from, replicas = _number(_REPLICAS, 1)
    if replicas < 1:
        raise ValueError(f"{replicas_from}={replicas} must be at least 1")
    if rank < 0:
        raise ValueError(f"{rank_from}={rank} must be at least 0")
    if rank >= replicas:
        known = f"{replicas_from}={replicas}" if replicas_from else f"{_REPLICAS[0]}, which is 1"
        raise ValueError(f"{rank_from}={rank} must be below {known}")
    return rank, replicas


def _first(names: tuple[str, ...]) -> tuple[str, str]:
    """The first variable that is set, and its value; empty strings if there is none."""
    for name in names:
        value = os.environ.get(name, "")
        if value:
            return name, value
    return "", ""


def _number(names: tuple[str, ...], default: int) -> tuple[str, int]:
    name, text = _first(names)
    if not name:
        return "", default
    try:
        return name, int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number") from None
