"""What users see by default: notices, apart from progress bars; nothing on a closed terminal."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

_LOGGERS = ("async_checkpoint", "checkpoint", "elastic", "events", "inprocess", "integrations")


def notice(log: logging.Logger, message: str, *args: object, shown: bool = True) -> None:
    """Logs at level INFO; what is `shown` also goes to stderr if no logging is configured."""
    stderr = logging.lastResort
    if not shown or stderr is None or log.hasHandlers() or not log.isEnabledFor(logging.WARNING):
        log.info(message, *args)
        return
    record = log.makeRecord(log.name, logging.INFO, "", 0, message, args, None)
    if log.filter(record):
        stderr.handle(record)


@contextlib.contextmanager
def apart_from_bars() -> Iterator[None]:
    """In this block, a message of this package that finds a bar of tqdm begins a new line."""
    ended: dict[int, float] = {}

    def end_bars(record: logging.LogRecord) -> bool:
        nonlocal ended
        # No tqdm, or another version; a closed file; a set that another thread changes.
        with contextlib.suppress(KeyError, AttributeError, OSError, ValueError, RuntimeError):
            found: list[Any] = list(sys.modules["tqdm"].tqdm._instances)
            bars = [bar for bar in found if not bar.disable and bar.fp.fileno() in (1, 2)]
            drawn = {id(bar): float(bar.last_print_t) for bar in bars}
            if drawn.items() - ended.items():
                bars[0].fp.write("\n")
                bars[0].fp.flush()
            ended = drawn
        return True

    loggers = [logging.getLogger(f"outlast.{name}") for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(end_bars)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(end_bars)


def leave_closed_terminal() -> None:
    """Lets stdout and stderr lead nowhere where they led to a terminal that is closed: a program
    that prints would otherwise end with EIO, before it has saved. Safe in a signal handler.
    """
    for fd in (1, 2):
        try:
            os.write(fd, b"")
        except OSError as e:
            if e.errno != errno.EIO:
                continue
            with contextlib.suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(nowhere, fd)
                os.close(nowhere)
