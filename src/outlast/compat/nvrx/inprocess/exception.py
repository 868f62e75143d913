"""The exceptions: those of `outlast.inprocess.exception`."""

from outlast.inprocess.exception import (
    HealthCheckError,
    InternalError,
    RankShouldRestart,
    RestartAbort,
    RestartError,
    TimeoutError,
)

__all__ = [
    "HealthCheckError",
    "InternalError",
    "RankShouldRestart",
    "RestartAbort",
    "RestartError",
    "TimeoutError",
]
