"""Messages that are no warnings, and that users see by default."""

from __future__ import annotations

import logging


def notice(log: logging.Logger, message: str, *args: object, shown: bool = True) -> None:
    """Logs at level INFO. Where the program has not configured logging, Python writes warnings to
    stderr and drops the rest: what is to be `shown` is then written to stderr too.
    """
    stderr = logging.lastResort
    if not shown or stderr is None or log.hasHandlers() or not log.isEnabledFor(logging.WARNING):
        log.info(message, *args)
        return
    record = log.makeRecord(log.name, logging.INFO, "", 0, message, args, None)
    if log.filter(record):
        stderr.handle(record)
