"""The events of a job without `--events-dir`: kept beside its checkpoints, bounded in size.

The launcher gives the processes of its host a *spool*, a temporary folder. The first checkpointer
says where the checkpoints are (`keep_events_beside`); then each process copies the log that it has
written, as `NAME.0.jsonl`, and goes on in the new folder. The launcher copies those of processes
that have ended. A log over the limit becomes `NAME.1.jsonl`, in place of the one before: the first
and the newest events stay, and a note says how many bytes are gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import tempfile
from pathlib import Path

log = logging.getLogger("outlast.events")

BESIDE = ".events"
"""The folder of the runs, in a folder of checkpoints."""
DROPPED = "outlast.dropped_events"
"""Name of the note at the beginning of a log; `data` has the `file` and the `bytes` of all those
that are missing before it.
"""
_RUN, _MOVED = ".run", ".moved"
_KEPT_RUNS = 8
_BYTES = 64 << 20  # of the logs of a run
_LEAST_BYTES = 64 << 10
_LOGS_OF_RANK = 3 * 3  # of the call, its monitor and the checkpointer; the three parts of each


class Spool:
    """The spool that a log is in; `limit_bytes` is how large a log becomes."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes

    @classmethod
    def create(cls, folder: Path, run: str, ranks: int) -> None:
        """Makes `folder` a spool: that of the run with this folder name."""
        limit = max(_BYTES // (_LOGS_OF_RANK * ranks), _LEAST_BYTES)
        (folder / _RUN).write_text(f"{limit} {run}")

    @classmethod
    def of(cls, folder: Path) -> Spool | None:
        try:
            limit = (folder / _RUN).read_text().partition(" ")[0]
        except OSError:
            return None
        return cls(folder, int(limit))

    @property
    def target(self) -> Path | None:
        """Where the events are kept; `None` as long as that is not known."""
        with contextlib.suppress(OSError):
            return Path((self.folder / _MOVED).read_text())
        return None

    def keep_in(self, base: Path) -> None:
        """The events are kept in `base`: the first call counts."""
        if self.target is None:
            target = base / (self.folder / _RUN).read_text().partition(" ")[2]
            target.mkdir(parents=True, exist_ok=True)
            for folder in sorted(base.iterdir())[:-_KEPT_RUNS]:
                if folder < target and not is_alive(folder):
                    shutil.rmtree(folder, ignore_errors=True)
            self.copy_all(target)
            _replace(self.folder / _MOVED, str(target).encode())

    def copy_all(self, target: Path) -> None:
        for path in self.folder.glob("*.jsonl"):
            if not path.is_symlink():
                self.copy(path, target)

    def copy(self, path: Path, target: Path) -> Path:
        """Copies a log, and returns where it goes on."""
        place = target / f"{socket.gethostname()}-{path.name}"
        _replace(place.with_suffix(".0.jsonl"), path.read_bytes())
        # What follows the logs of this folder goes on there.
        with contextlib.suppress(FileExistsError):
            path.with_suffix(".moved.jsonl").symlink_to(place)
        return place


def keep_events_beside(events: str, checkpoints: str, *, warn: bool) -> None:
    """Called with the folder of events that this process was given, if any, once it has opened the
    folder of its checkpoints; without effect if it is no spool. Those of an object store are kept
    in the folder for temporary files. `warn`: on one rank.
    """
    if not events or os.path.lexists(f"{events}/{_MOVED}"):  # it is known where: as `keep_in`
        return
    spool = Spool.of(Path(events))
    if spool is None:
        return
    remote = "://" in checkpoints
    temporary = Path(tempfile.gettempdir()) / f"outlast-{os.getuid()}"
    try:
        if remote:
            temporary.mkdir(mode=0o700, exist_ok=True)
            if temporary.stat().st_uid != os.getuid():
                raise PermissionError(f"{temporary} belongs to another user")
        spool.keep_in(temporary / "events" if remote else Path(checkpoints) / BESIDE)
    except OSError as e:
        if warn:
            log.warning("the events of this run are not kept: %s; give --events-dir", e)


def is_alive(folder: Path) -> bool:
    """Whether a launcher of the run has locked its log, on any host, where locks are shared."""
    for path in folder.glob("*agent-*.jsonl"):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                return True
            except OSError:
                continue  # no locks on this file system
    return False


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_bytes(content)
    os.replace(draft, path)
