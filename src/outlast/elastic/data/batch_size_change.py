"""Says that a run continues with another global batch size than it was saved with."""

from __future__ import annotations

import logging

log = logging.getLogger("outlast.elastic")


def warn_if_changed(now: int, saved: int, *, rank: int, place: str) -> None:
    """Logs a warning on rank 0, if the sizes differ; `place` is the position in the data."""
    if now == saved or rank != 0:
        return
    log.warning(
        "the global batch size is %d, %d was saved: training continues at %s, and each step now "
        "takes %d samples; learning rates and schedules that count steps are not adjusted",
        now,
        saved,
        place,
        now,
    )
