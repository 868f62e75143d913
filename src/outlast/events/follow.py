"""Reads the events of a running job as they are written: each poll reads only what is new.

A log is identified by its inode, not by its name. A log that was renamed (rotated) is read to its
end under its new name, and the new log that took its name is read from its beginning. A log that
became shorter was truncated, and is read from its beginning.

A line is read once it is complete: what a process is about to write, or was killed while writing,
stays in the file. A complete line that is not an event is skipped and counted, because what watches
a job must not stop at a line that `outlast report` would refuse.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from outlast.errors import EventLogError
from outlast.events.event import Event, parse_line

_READ_BYTES = 4 << 20
_LONGEST_LINE = 1 << 24  # more without a line end is not a log: it would be read again each time


@dataclass
class _Log:
    """How far a log has been read."""

    position: int = 0
    lines: int = 0
    decided: bool = False
    wanted: bool = True


class Follower:
    """Follows the logs directly in a folder: existing ones, and those created later. `host`: if
    given, only the logs of processes on this host are read. Where hosts share the folder, the first
    event of each log decides: a process writes its own log.
    """

    def __init__(self, folder: str | os.PathLike[str], *, host: str | None = None) -> None:
        self.folder = Path(folder)
        # file and line of each complete line that was not an event, the newest last; at most a
        # hundred of them are kept
        self.damaged: list[str] = []
        self.damaged_lines = 0  # how many there were
        self._host = host
        self._logs: dict[tuple[int, int], _Log] = {}

    def poll(self) -> list[Event]:
        """The events written since the last call: in the order of each log, and by time between
        the logs of a host.
        """
        events: list[Event] = []
        seen = set()
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    key = self._key(entry)
                    if key is not None:
                        seen.add(key)
                        events += self._read(Path(entry.path), self._logs.setdefault(key, _Log()))
        for gone in self._logs.keys() - seen:
            del self._logs[gone]
        # Stable: events of one log that have the same time keep their order.
        return sorted(events, key=lambda event: event.time)

    def _key(self, entry: os.DirEntry[str]) -> tuple[int, int] | None:
        """The identity of a log; `None` for another file. A log keeps it when it is renamed."""
        if not entry.is_file():  # or a link: see `spool.py`
            return None
        status = entry.stat()
        key = status.st_dev, status.st_ino
        return key if entry.name.endswith(".jsonl") or key in self._logs else None

    def _read(self, path: Path, log: _Log) -> list[Event]:
        events: list[Event] = []
        while log.wanted and path.stat().st_size != log.position:
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size < log.position:
                    log.position = log.lines = 0
                file.seek(log.position)
                content = file.read(_READ_BYTES)
                if b"\n" not in content:
                    content += file.read(_LONGEST_LINE)
            end = content.rfind(b"\n") + 1
            if not end:
                break  # the last line is not complete
            log.position += end
            events += self._parse(content[:end], path, log)
        return events if log.wanted else []

    def _parse(self, content: bytes, path: Path, log: _Log) -> list[Event]:
        events = []
        for line in content.split(b"\n")[:-1]:
            log.lines += 1
            try:
                event = parse_line(line, f"{path}, line {log.lines}")
            except EventLogError as error:
                self.damaged_lines += 1
                self.damaged = [*self.damaged[-99:], str(error)]
                continue
            if not log.decided:
                log.decided = True
                log.wanted = self._host in (None, event.host)
                if not log.wanted:
                    break
            events.append(event)
        return events
