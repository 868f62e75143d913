"""Whether an exception is an interrupt, or the echo of a fault on another rank."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import torch.distributed as dist

from outlast.errors import RankShouldRestart
from outlast.system.error_text import message

# Messages of gloo (pair.cc), NCCL (remote process exited) and torch's TCP store on either side of a
# broken connection.
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


def is_consequence(error: BaseException) -> bool:
    """Whether `error`, or an exception that it was raised from, looks like a broken connection."""
    for seen in _chain(error):
        if isinstance(seen, dist.DistNetworkError | dist.DistBackendError):
            return True
        if isinstance(seen, RuntimeError | OSError):
            text = message(seen)
            if any(echo in text for echo in _ECHOES):
                return True
    return False


def is_interrupt(error: BaseException) -> bool:
    """Whether `error` is the interrupt, or an exception raised while handling the interrupt: user
    code may wrap it, or fail in its cleanup. Exceptions that end the process, such as SystemExit,
    do not count.
    """
    if isinstance(error, Exception):
        return any(isinstance(seen, RankShouldRestart) for seen in _chain(error))
    return isinstance(error, RankShouldRestart)


def ending_in(error: BaseException) -> BaseException:
    """The exception that ends the process or the job (KeyboardInterrupt, SystemExit, RestartAbort)
    if `error` is an interrupt raised while that exception was propagating; otherwise `error`.
    """
    if isinstance(error, RankShouldRestart):
        for seen in _chain(error):
            if not isinstance(seen, Exception | RankShouldRestart | GeneratorExit):
                return seen
    return error


def release_frames(error: BaseException) -> None:
    """Clears the local variables in the tracebacks of `error`: models, process groups and buffers,
    which the next iteration recreates.
    """
    for seen in _chain(error):
        traceback.clear_frames(seen.__traceback__)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes and contexts; each once, since `raise e from e` is a cycle."""
    met: set[int] = set()
    seen: BaseException | None = error
    while seen is not None and id(seen) not in met:
        met.add(id(seen))
        yield seen
        seen = seen.__cause__ or seen.__context__
