"""Reads the event logs of a run, strictly: a line that is not an event is an error that names file
and line.

There is one exception: the last line of a file may be torn, because its process was killed while
writing it. That line is skipped, and a `Note` named `TORN_LINE` takes its place, so that the
report can mention it.
"""

from __future__ import annotations

import os
from pathlib import Path

from outlast.errors import EventLogError
from outlast.events import Event, Note
from outlast.events.log_lines import parse_line
from outlast.events.run_folders import Run, choose_run, logs_in, runs_in

TORN_LINE = "outlast.torn_line"
"""Name of the note that replaces a torn last line; `data["file"]` is the name of the file."""


def load(directory: str | os.PathLike[str], run: str | None = None) -> list[Event]:
    """Reads the events of a run from all its `*.jsonl` files, each file in its own order.

    Args:
        directory: the directory of events, or the folder of one run in it.
        run: name or id of the run (see `run_folders.py`); the newest by default.

    Raises:
        EventLogError: if there is no such directory, run or log, if a file cannot be read, or if a
            line (other than a torn last one) is not an event; names file and line.
    """
    return load_run(choose_run(runs_in(directory), run))


def load_run(run: Run) -> list[Event]:
    """Same as `load`, for a run that was already found."""
    return [event for path in logs_in(run.folder) for event in _load_file(path)]


def _load_file(path: Path) -> list[Event]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EventLogError(f"{path}: cannot be read: {error.strerror}") from error
    events: list[Event] = []
    *lines, last = content.split(b"\n")  # a sink ends each line, so that `last` is empty or torn
    for number, line in enumerate(lines, start=1):
        events.append(parse_line(line, f"{path}, line {number}"))
    if last:
        try:
            events.append(parse_line(last, f"{path}, line {len(lines) + 1}"))
        except EventLogError:
            events.append(Note(name=TORN_LINE, data={"file": path.name}))
    return events
