"""Exceptions as facts: one line for people, and whether it is the echo of another rank's end."""

from __future__ import annotations

import traceback

import torch.distributed as dist

__all__ = ["describe", "is_consequence", "let_go"]

# What the ends of a broken connection say: gloo (pair.cc), NCCL (remote process exited), and
# torch's TCP store.
_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
    "ncclRemoteError",
    "NCCL communicator was aborted",
    "Connection was likely closed",
    "Software caused connection abort",
)


def describe(error: BaseException) -> str:
    """Type and message in one line."""
    message = str(error).strip().partition("\n")[0]
    name = type(error).__name__
    return f"{name}: {message}" if message else name


def is_consequence(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, is what a broken connection looks like."""
    seen: BaseException | None = error
    while seen is not None:
        network = isinstance(seen, dist.DistNetworkError | dist.DistBackendError)
        if network or (
            isinstance(seen, RuntimeError | OSError) and any(e in str(seen) for e in _ECHOES)
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def let_go(error: BaseException) -> None:
    """Lets go of the local variables that the tracebacks of `error` hold: models, groups,
    buffers, which the next iteration makes anew.
    """
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
