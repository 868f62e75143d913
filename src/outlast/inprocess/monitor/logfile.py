"""Lines in `monitor_process_logfile`, each with the time; that file is the process's stdout."""

from __future__ import annotations

import contextlib
import datetime


def write_line(text: object) -> None:
    """Writes one line. A full disk does not end the monitor process."""
    now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
    with contextlib.suppress(OSError):
        print(f"{now} {text}")
