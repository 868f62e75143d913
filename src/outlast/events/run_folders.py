"""The runs in a directory of events, one folder per run, named after its start time; and the events
of a run, when it is over or as they are written.

    events/20261121-212345.123-nightly/agent-17.jsonl
    events/20261121-212345.123-nightly/rank0-18.jsonl

Without folders, the logs of a second run would be read as part of the first, since process IDs and
run IDs repeat. The name determines the order, because a copied folder has different file times.

Logs directly in the directory are also a run: that of a job under a launcher other than
`outlast run`, which makes no folders.

`Follower` reads only what is new at each poll. A log is identified by its inode, not by its name:
one that was renamed (rotated) is read to its end under its new name, and the new log that took its
name is read from its beginning, as is a log that became shorter. A line is read once it is
complete: what a process is about to write, or was killed while writing, stays in the file. A
complete line that is not an event is skipped and counted, because what watches a job must not stop
at a line that `outlast report` would refuse.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import re
from pathlib import Path

from outlast.errors import EventLogError
from outlast.events.event import Event, Note, parse_line
from outlast.events.spool import BESIDE, is_alive
from outlast.system.units import listed

OWN = "."
"""The name of the run whose logs are directly in the directory."""

TORN_LINE = "outlast.torn_line"
"""Name of the note that replaces a torn last line; `data["file"]` is the name of the file."""

_STAMP = "%Y%m%d-%H%M%S"
_READ_BYTES = 4 << 20
_LONGEST_LINE = 1 << 24  # more without a line end is not a log: it would be read again each time
_NAME = re.compile(r"(\d{8}-\d{6})\.(\d{3})-(.+)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run with logs."""

    folder: Path  # the folder of the logs
    name: str  # the name of that folder; `OWN` if it is the directory itself
    run_id: str  # the launcher's run ID; empty if the logs are directly in the directory
    at: datetime.datetime  # start time in UTC; for `OWN`, the last modification of a log

    @property
    def own(self) -> bool:
        return self.name == OWN


def new_run(directory: str | os.PathLike[str], run_id: str) -> Path:
    """Creates the folder for the events of a run that starts now."""
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    while True:
        folder = root / run_name(run_id)
        # Two runs of one id in one millisecond: the second takes the next millisecond.
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder


def run_name(run_id: str) -> str:
    """The name of the folder of a run that starts now."""
    now = datetime.datetime.now(datetime.timezone.utc)
    stamp = f"{now.strftime(_STAMP)}.{now.microsecond // 1000:03d}"
    return f"{stamp}-{run_id.replace(os.sep, '_')}"


def runs_in(directory: str | os.PathLike[str]) -> list[Run]:
    """The runs with logs in `directory`, the oldest first. An `EventLogError` says if there is
    none.
    """
    root = Path(directory)
    if (root / BESIDE).is_dir():  # a folder of checkpoints
        root = root / BESIDE
    if not root.is_dir():
        why = "" if root.exists() else "it does not exist; "
        where = "the directory of `outlast run --events-dir`, or the folder of the checkpoints"
        raise EventLogError(f"{root} is not a folder: {why}give {where}")
    runs = []
    for folder in root.iterdir():
        match = _NAME.fullmatch(folder.name)
        if match is None or not folder.is_dir() or not logs_in(folder):
            continue
        with contextlib.suppress(ValueError):  # digits that are not a date: not a folder of a run
            at = datetime.datetime.strptime(f"{match[1]}.{match[2]} +0000", f"{_STAMP}.%f %z")
            runs.append(Run(folder, folder.name, match[3], at))
    if own := logs_in(root):
        written = max(path.stat().st_mtime for path in own)
        at = datetime.datetime.fromtimestamp(written, datetime.timezone.utc)
        runs.append(Run(root, OWN, "", at))
    if not runs:
        inside = [path for path in sorted(root.iterdir()) if path.is_dir() and _has_runs(path)]
        hint = f"; folders in it that have: {listed(inside, 3)}" if inside else ""
        raise EventLogError(f"{root} has no event logs (*.jsonl){hint}")
    return sorted(runs, key=lambda run: (run.at, run.name))


def _has_runs(folder: Path) -> bool:
    """Whether `folder` has logs, or is a directory with runs of `outlast run`."""
    try:
        runs = [each for each in folder.iterdir() if _NAME.fullmatch(each.name) and each.is_dir()]
        return bool(logs_in(folder)) or any(map(logs_in, runs))
    except OSError:
        return False


def choose_run(runs: list[Run], wanted: str | None) -> Run:
    """The newest run with the name or ID `wanted`, or, if that is `None`, of all: of those whose
    launcher is alive, if there are any. An `EventLogError` names the existing runs if there is
    none.
    """
    found = [run for run in runs if wanted is None or wanted in (run.name, run.run_id)]
    alive = [run for run in found if len(found) > 1 and is_alive(run.folder)]
    if found:
        return (alive or found)[-1]
    raise EventLogError(f"no run {wanted!r}; there are: {', '.join(run.name for run in runs)}")


def logs_in(folder: Path) -> list[Path]:
    """The event logs directly in `folder`, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix == ".jsonl" and path.is_file())


def load(directory: str | os.PathLike[str], run: str | None = None) -> list[Event]:
    """Reads the events of a run from all its `*.jsonl` files, each file in its own order. Arguments
    and errors are those of `report.load_run`. If the last line of a file is torn, because its
    process was killed while writing it, a `Note` named `TORN_LINE` takes its place.
    """
    return events_of(choose_run(runs_in(directory), run))


def events_of(run: Run) -> list[Event]:
    """Same as `load`, for a run that was already found."""
    return [event for path in logs_in(run.folder) for event in _load_file(path)]


def _load_file(path: Path) -> list[Event]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise EventLogError(f"{path}: cannot be read: {error.strerror}") from error
    *lines, last = content.split(b"\n")  # a sink ends each line, so that `last` is empty or torn
    events = [parse_line(line, f"{path}, line {n}") for n, line in enumerate(lines, start=1)]
    if last:
        try:
            events.append(parse_line(last, f"{path}, line {len(lines) + 1}"))
        except EventLogError:
            events.append(Note(name=TORN_LINE, data={"file": path.name}))
    return events


@dataclasses.dataclass
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
