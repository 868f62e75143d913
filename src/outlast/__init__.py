"""Training jobs that outlast their faults.

`outlast.inprocess` restarts a function in place, `outlast.async_checkpoint` saves in the background
(`outlast.Checkpointer`), `outlast.elastic` brings state back at any size (`outlast.Job`),
`outlast run` keeps a job's survivors and replaces its dead, `outlast.chaos` injects faults,
`outlast.events` tells what happened.

Nothing is imported before it is asked for: the small processes that `outlast` starts beside a
training have no use for torch, whose import takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlast.async_checkpoint import Checkpointer
    from outlast.elastic import Job

    __version__: str

__all__ = ["Checkpointer", "Job"]


def __getattr__(name: str) -> Any:
    if name == "Checkpointer":
        from outlast.async_checkpoint import Checkpointer

        return Checkpointer
    if name == "Job":
        from outlast.elastic import Job

        return Job
    if name == "__version__":
        from importlib.metadata import version

        return version("outlast")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
