"""The only module of this package that reads `os.environ`.

Each value comes from the first variable that is set and not empty: outlast's, the torch launcher's,
or AdaptDL's. Values are not cached, because a restart in place may change them.
"""

from __future__ import annotations

import os

__all__ = [
    "checkpoint_path",
    "from_ray",
    "num_replicas",
    "num_restarts",
    "replica_rank",
]

_PATH = ("OUTLAST_CHECKPOINT_PATH", "ADAPTDL_CHECKPOINT_PATH")
_RANK = ("OUTLAST_REPLICA_RANK", "RANK", "ADAPTDL_REPLICA_RANK")
_REPLICAS = ("OUTLAST_NUM_REPLICAS", "WORLD_SIZE", "ADAPTDL_NUM_REPLICAS")
_RESTARTS = ("OUTLAST_NUM_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "ADAPTDL_NUM_RESTARTS")


def checkpoint_path() -> str | None:
    """The folder of the checkpoints; `None` if it is not set: nothing is saved or loaded then."""
    return _first(_PATH)[1] or None


def replica_rank() -> int:
    """The rank of this replica; 0 if no variable is set.

    Raises:
        ValueError: names the variable that is not a number, or out of range.
    """
    return _place()[0]


def num_replicas() -> int:
    """The number of replicas of the job; 1 if no variable is set.

    Raises:
        ValueError: names the variable that is not a number, or out of range.
    """
    return _place()[1]


def num_restarts() -> int:
    """How many times the job has been restarted; 0 if no variable is set.

    Raises:
        ValueError: names the variable that is not a number, or negative.
    """
    variable, restarts = _number(_RESTARTS, 0)
    if restarts < 0:
        raise ValueError(f"{variable}={restarts} must be at least 0")
    return restarts


def from_ray() -> bool:
    """Whether this process runs a Ray Tune trial. States are then saved to and loaded from the
    trial's checkpoint, and `checkpoint_path()` is ignored.
    """
    from outlast.elastic import ray_trial

    return ray_trial.in_trial()


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
