"""Whether an exception is an interrupt, the echo of a fault on another rank, or neither."""

from __future__ import annotations

import torch.distributed as dist

from outlast.errors import OutlastError, RankShouldRestart
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
    """Whether `error`, or an exception that it was raised from, looks like a broken connection, or
    is the error of another rank.
    """
    for seen in chain(error):
        if isinstance(seen, OutlastError) and seen.of_another_rank:
            return True
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


def overtaken(error: BaseException, handled: BaseException | None) -> Exception | None:
    """The exception that was on its way out of the function when the interrupt `error` was raised;
    not one that was `handled` outside when the function was called, and not an echo.

    Example: a rank fails, and destroys its process group in a `finally`. The others see a closed
    connection, and their restart interrupts the `finally`. An exception that an `except` handles
    for good looks the same to Python, so this one may be harmless.
    """
    interrupted = False
    before = set() if handled is None else {id(seen) for seen in chain(handled)}
    for seen in chain(error):
        if id(seen) in before:
            return None
        if isinstance(seen, RankShouldRestart):
            interrupted = True
        elif interrupted and isinstance(seen, Exception) and not is_interrupt(seen):
            return None if is_consequence(seen) else seen
    return None


def ending_in(error: BaseException) -> BaseException:
    """The exception that ends the process or the job (KeyboardInterrupt, SystemExit, RestartAbort)
    if `error` is an interrupt raised while that exception was propagating; otherwise `error`.
    """
    if isinstance(error, RankShouldRestart):
        for seen in chain(error):
            if not isinstance(seen, Exception | RankShouldRestart | GeneratorExit):
                return seen
    return error
