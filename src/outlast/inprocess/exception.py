"""The exceptions of restart in place; `outlast.errors` documents the whole tree."""

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
    UnrecoverableFault,
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
    "UnrecoverableFault",
]
