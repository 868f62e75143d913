"""The exceptions of restart in place; the whole tree is drawn in `outlast.errors`."""

from outlast.errors import (
    FaultCounterExceeded,
    HealthCheckError,
    InternalError,
    RankDiscarded,
    RankFault,
    RankLostError,
    RankShouldRestart,
    RestartAbort,
    RestartError,
    StoreError,
    TimeoutError,
)

__all__ = [
    "FaultCounterExceeded",
    "HealthCheckError",
    "InternalError",
    "RankDiscarded",
    "RankFault",
    "RankLostError",
    "RankShouldRestart",
    "RestartAbort",
    "RestartError",
    "StoreError",
    "TimeoutError",
]
