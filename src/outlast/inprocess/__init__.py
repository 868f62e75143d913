"""Restart in place: a fault on any rank restarts the function on every healthy rank.

To migrate, change `import nvidia_resiliency_ext.inprocess as inprocess` to `import
outlast.inprocess as inprocess`. The names are those of its version 0.2; `docs/migration-nvrx.md`
lists what has changed there since.
"""

from outlast.inprocess import (
    abort,
    attribution,
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
    TimeoutError,
)
from outlast.inprocess.progress.adaptive_timeout import Adaptive
from outlast.inprocess.recovery.host_protocol import GrowPolicy
from outlast.inprocess.state import State, Status
from outlast.inprocess.wrapper import Wrapper

__all__ = [
    "Adaptive",
    "CallWrapper",
    "Compose",
    "GrowPolicy",
    "HealthCheckError",
    "InternalError",
    "RankShouldRestart",
    "RestartAbort",
    "RestartError",
    "State",
    "Status",
    "TimeoutError",
    "Wrapper",
    "abort",
    "attribution",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "rank_assignment",
    "rank_filter",
    "state",
    "store",
]
