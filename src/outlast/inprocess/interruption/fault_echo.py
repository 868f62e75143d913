"""Whether an exception is an interrupt, or the echo of a fault on another rank."""

from __future__ import annotations

import torch.distributed as dist

from outlast.errors import RankShouldRestart
from outlast.system.error_text import message
from outlast.system.tracebacks import chain

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
    for seen in chain(error):
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
        return any(isinstance(seen, RankShouldRestart) for seen in chain(error))
    return isinstance(error, RankShouldRestart)


def ending_in(error: BaseException) -> BaseException:
    """The exception that ends the process or the job (KeyboardInterrupt, SystemExit, RestartAbort)
    if `error` is an interrupt raised while that exception was propagating; otherwise `error`.
    """
    if isinstance(error, RankShouldRestart):
        for seen in chain(error):
            if not isinstance(seen, Exception | RankShouldRestart | GeneratorExit):
                return seen
    return error
