"""Restart in place: a fault on any rank restarts the function on every healthy rank.

The names are those of nvidia-resiliency-ext 0.2. `outlast.compat.nvrx.inprocess` has the names and
signatures of 0.4; `docs/migration.md` compares them.
"""

from outlast.coordination.repeated_faults import RepeatedFaults
from outlast.inprocess import (
    abort,
    attribution,
    ending,
    exception,
    finalize,
    health_check,
    initialize,
    rank_assignment,
    rank_filter,
    state,
    store,
)
from outlast.inprocess.call_wrapper import CallWrapper
from outlast.inprocess.compose import Compose
from outlast.inprocess.exception import (
    HealthCheckError,
    InternalError,
    RankShouldRestart,
    RestartAbort,
    RestartError,
    UnrecoverableFault,
)
from outlast.inprocess.recovery.host_protocol import GrowPolicy
from outlast.inprocess.state import State, Status
from outlast.inprocess.timeouts import Adaptive, Timeouts
from outlast.inprocess.wrapper import Wrapper

__all__ = [
    "Adaptive",
    "CallWrapper",
    "Compose",
    "GrowPolicy",
    "HealthCheckError",
    "InternalError",
    "RankShouldRestart",
    "RepeatedFaults",
    "RestartAbort",
    "RestartError",
    "State",
    "Status",
    "Timeouts",
    "UnrecoverableFault",
    "Wrapper",
    "abort",
    "attribution",
    "ending",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "rank_assignment",
    "rank_filter",
    "state",
    "store",
]
