"""The exception that ends a wrapped call, as its user sees it: without this package's frames."""

from __future__ import annotations

import logging
from types import TracebackType

from outlast.errors import InternalError, OutlastError, RankExcluded, RestartAbort
from outlast.inprocess.interruption.interrupter import USER_REGION
from outlast.inprocess.interruption.permanent_error import is_misuse
from outlast.system.tracebacks import chain
from outlast.system.user_frames import is_installed, is_own

log = logging.getLogger("outlast.inprocess")


def remove_own_frames(error: BaseException) -> None:
    """Removes this package's frames from the tracebacks of `error` and of its causes: those that
    led to the user's code, and all of them where this package raised the error on purpose. What may
    be a mistake in this package keeps its frames; so does everything while its log is at DEBUG.
    """
    if not log.isEnabledFor(logging.DEBUG):
        for each in chain(error):
            each.__traceback__ = _chained(_kept(each))


def _kept(error: BaseException) -> list[TracebackType]:
    found = []
    trace = error.__traceback__
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    on_purpose = isinstance(error, OutlastError | RestartAbort | RankExcluded) or is_misuse(error)
    if on_purpose and not isinstance(error, InternalError):
        return [each for each in found if not is_own(each.tb_frame)]
    begin = next((n for n, each in enumerate(found) if _is_users(each)), len(found))
    begins = [n for n in range(begin, len(found)) if not is_own(found[n].tb_frame)]
    return found[begins[0] :] if begins else found


def _is_users(trace: TracebackType) -> bool:
    """Whether the traceback enters the function here, or another part of the user's program."""
    frame = trace.tb_frame
    return frame.f_code is USER_REGION or not (is_own(frame) or is_installed(frame))


def _chained(traces: list[TracebackType]) -> TracebackType | None:
    found = None
    for each in reversed(traces):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found
