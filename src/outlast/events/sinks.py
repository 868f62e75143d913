"""The destinations of events: a JSONL file, a list in memory, or nowhere.

A sink is called from several threads. `JsonlSink` writes each line with one `write` to a file
opened for appending, so that lines of threads never mix and a killed process leaves at most one
torn line, its last.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Protocol

from outlast.events.types.base import Event, event_to_dict

__all__ = ["JsonlSink", "MemorySink", "NullSink", "Sink"]


class Sink(Protocol):
    """Takes events. Must be callable from any thread."""

    def write(self, event: Event) -> None:
        """Takes one event."""
        ...

    def close(self) -> None:
        """Releases the sink's resources. No event is written afterwards."""
        ...


class NullSink:
    """Drops every event."""

    def write(self, event: Event) -> None:
        pass

    def close(self) -> None:
        pass


class MemorySink:
    """Keeps events in `events`, in the order of their arrival."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._lock = threading.Lock()

    def write(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)

    def close(self) -> None:
        pass


class JsonlSink:
    """Appends events to a file, one JSON object per line.

    Args:
        path: the file; its directory is created if missing. Nothing is written outside it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o644)
        self._lock = threading.Lock()

    def write(self, event: Event) -> None:
        line = json.dumps(event_to_dict(event), separators=(",", ":")) + "\n"
        content = line.encode()
        with self._lock:
            if self._fd >= 0:
                written = os.write(self._fd, content)
                if written < len(content):
                    # A full disk. The next line must not continue this one: it would be damaged.
                    os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
