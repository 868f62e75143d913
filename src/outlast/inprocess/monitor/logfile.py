"""What a monitor process writes: lines with the time in `monitor_process_logfile`, its stdout, and
lines on the stderr of its main process, if that process cannot write them itself.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from pathlib import Path


def write_line(text: object) -> None:
    """Writes one line. A full disk does not end the monitor process."""
    now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
    with contextlib.suppress(OSError):
        print(f"{now} {text}")


def write_for(pid: int, line: str) -> None:
    """Writes a line to the stderr of another process, unless that is closed, a socket, or a file
    at a position of the other process's own, where it would overwrite the line. The stream is open
    only for the line: a descriptor that stayed open would keep a pipe from ending.
    """
    try:
        flags = Path(f"/proc/{pid}/fdinfo/2").read_text().partition("flags:")[2].split()[0]
        descriptor = os.open(
            f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
        )
    except OSError as e:
        write_line(f"{line} (not shown: {e})")
        return
    with os.fdopen(descriptor, "wb", buffering=0) as stream:
        if not stream.seekable() or int(flags, 8) & os.O_APPEND:
            try:
                stream.write(f"{line}\n".encode())
            except OSError as e:
                write_line(f"{line} (not shown: {e})")
