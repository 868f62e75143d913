"""Whether an exception is the consequence of another rank's fault, or of the interrupt."""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import torch.distributed as dist

from outlast.errors import RankShouldRestart
from outlast.system.error_text import message

__all__ = ["ending_in", "is_consequence", "is_interrupt", "let_go"]

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


def is_consequence(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, is what a broken connection looks like."""
    for seen in _chain(error):
        if isinstance(seen, dist.DistNetworkError | dist.DistBackendError):
            return True
        if isinstance(seen, RuntimeError | OSError):
            text = message(seen)
            if any(echo in text for echo in _ECHOES):
                return True
    return False


def is_interrupt(error: BaseException) -> bool:
    """Whether `error` is the interrupt, or an exception that was raised while it was handled: user
    code may wrap it, or fail in its own clean-up. Not what ends the process, as SystemExit.
    """
    if isinstance(error, Exception):
        return any(isinstance(seen, RankShouldRestart) for seen in _chain(error))
    return isinstance(error, RankShouldRestart)


def ending_in(error: BaseException) -> BaseException:
    """What ends the process or the job (KeyboardInterrupt, SystemExit, RestartAbort), if `error` is
    the interrupt that came on its way out of the function; else `error`.
    """
    if isinstance(error, RankShouldRestart):
        for seen in _chain(error):
            if not isinstance(seen, Exception | RankShouldRestart | GeneratorExit):
                return seen
    return error


def let_go(error: BaseException) -> None:
    """Lets go of the local variables that the tracebacks of `error` hold: models, groups,
    buffers, which the next iteration makes anew.
    """
    for seen in _chain(error):
        traceback.clear_frames(seen.__traceback__)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from; each once, since `raise e from e` is a circle."""
    met: set[int] = set()
    seen: BaseException | None = error
    while seen is not None and id(seen) not in met:
        met.add(id(seen))
        yield seen
        seen = seen.__cause__ or seen.__context__
