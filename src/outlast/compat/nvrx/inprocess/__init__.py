"""Restart in place with the names and signatures of nvidia_resiliency_ext.inprocess 0.4."""

from outlast.compat.nvrx.inprocess import (
    abort,
    attribution,
    completion,
    exception,
    finalize,
    health_check,
    initialize,
    nested_restarter,
    rank_assignment,
    rank_filter,
    state,
    store,
    terminate,
)
from outlast.compat.nvrx.inprocess.compose import Compose
from outlast.compat.nvrx.inprocess.state import FrozenState, Mode, State
from outlast.compat.nvrx.inprocess.wrap import CallWrapper, Wrapper

__all__ = [
    "CallWrapper",
    "Compose",
    "FrozenState",
    "Mode",
    "State",
    "Wrapper",
    "abort",
    "attribution",
    "completion",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "nested_restarter",
    "rank_assignment",
    "rank_filter",
    "state",
    "store",
    "terminate",
]
