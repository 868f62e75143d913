"""The exceptions of restart in place; `outlast.errors` documents the whole tree."""

from outlast.errors import (
    FaultCounterExceeded,
    HealthCheckError,
    InternalError,
    RankDiscarded,
    RankFault,
    RankLostError,
    RankShouldRestart,
    RankTimeout,
    RestartAbort,
    RestartError,
    StoreError,
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
    "RankTimeout",
    "RestartAbort",
    "RestartError",
    "StoreError",
    "UnrecoverableFault",
]

TimeoutError = RankTimeout  # its name in nvidia-resiliency-ext
