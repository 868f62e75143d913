"""Runs that write into one directory of events: a folder for each, named after when it began.

    events/20261121-212345.123-nightly/agent-17.jsonl
    events/20261121-212345.123-nightly/rank0-18.jsonl

Without that, the logs of a second run would be read as more of the first: process ids come again,
and so do run ids. The name is what tells the order, since a copy of a folder has other times.

Logs that lie in the directory itself are one run too: of a job that another launcher than
`outlast run` has started, which nobody gives a folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import re
from pathlib import Path

from outlast.errors import EventLogError

__all__ = ["OWN", "Run", "choose_run", "logs_in", "new_run", "runs_in"]

OWN = "."
"""The name of the run whose logs lie in the directory itself."""

_STAMP = "%Y%m%d-%H%M%S"
_NAME = re.compile(r"(\d{8}-\d{6})\.(\d{3})-(.+)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run whose logs are there.

    Attributes:
        folder: where they are.
        name: of that folder in the directory; `OWN` if it is the directory itself.
        run_id: of the launcher; empty where the logs lie in the directory itself.
        at: when it began, in UTC; where no name says it, when the last log was written to.
    """

    folder: Path
    name: str
    run_id: str
    at: datetime.datetime

    @property
    def own(self) -> bool:
        """Whether the logs lie in the directory itself."""
        return self.name == OWN


def new_run(directory: str | os.PathLike[str], run_id: str) -> Path:
    """Makes the folder for the events of a run that begins now.

    Raises:
        OSError: if it cannot be made.
    """
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    while True:
        now = datetime.datetime.now(datetime.timezone.utc)
        stamp = f"{now.strftime(_STAMP)}.{now.microsecond // 1000:03d}"
        folder = root / f"{stamp}-{run_id.replace(os.sep, '_')}"
        # Another one of this id and this millisecond: the next is not far.
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder


def runs_in(directory: str | os.PathLike[str]) -> list[Run]:
    """The runs that have logs in `directory`, the oldest first.

    Raises:
        EventLogError: if there is no such directory, or no log in it.
    """
    root = Path(directory)
    if not root.is_dir():
        raise EventLogError(f"{root}: no such directory")
    runs = []
    for folder in root.iterdir():
        match = _NAME.fullmatch(folder.name)
        if match is not None and folder.is_dir() and logs_in(folder):
            at = _moment(match[1], int(match[2]))
            if at is not None:
                runs.append(Run(folder, folder.name, match[3], at))
    own = logs_in(root)
    if own:
        written = max(path.stat().st_mtime for path in own)
        at = datetime.datetime.fromtimestamp(written, datetime.timezone.utc)
        runs.append(Run(root, OWN, "", at))
    if not runs:
        raise EventLogError(f"{root}: no event logs (*.jsonl) here")
    return sorted(runs, key=lambda run: (run.at, run.name))


def choose_run(runs: list[Run], wanted: str | None) -> Run:
    """The run of that name or id, the newest of them; the newest of all if none is wanted.

    Raises:
        EventLogError: if there is none; names those that are there.
    """
    for run in reversed(runs):
        if wanted is None or wanted in (run.name, run.run_id):
            return run
    raise EventLogError(f"no run {wanted!r}; there are: {', '.join(run.name for run in runs)}")


def logs_in(folder: Path) -> list[Path]:
    """The event logs that lie in `folder` itself, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix == ".jsonl" and path.is_file())


def _moment(stamp: str, milliseconds: int) -> datetime.datetime | None:
    try:
        found = datetime.datetime.strptime(stamp, _STAMP)
    except ValueError:  # digits that are no date: somebody else's folder
        return None
    return found.replace(microsecond=milliseconds * 1000, tzinfo=datetime.timezone.utc)
