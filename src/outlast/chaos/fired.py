"""Which faults have fired: each one fires once per job, whoever died and was replaced since.

A fault is claimed before it fires, by a marker file that only one process can create (`O_EXCL`),
so that the claim outlives the process that dies of the fault. A marker holds what fired where and
when, as JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path
from typing import Any, Protocol

from outlast.chaos.environment import Environment
from outlast.errors import ChaosError

__all__ = ["FiredFaults", "MarkerDirectory", "MemoryFired", "job_directory"]


class FiredFaults(Protocol):
    """Remembers claims. Must be callable from any thread."""

    def claim(self, key: str, record: dict[str, Any]) -> bool:
        """Whether the fault `key` was free, and is now taken; `record` says by whom."""
        ...

    def release(self, key: str) -> None:
        """Takes a claim back: the fault did not fire after all."""
        ...

    def records(self) -> list[dict[str, Any]]:
        """What was claimed, in the order of its time on the monotonic clock."""
        ...


class MemoryFired:
    """Claims of one process; for tests, and jobs whose processes all live."""

    def __init__(self) -> None:
        self._records: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def claim(self, key: str, record: dict[str, Any]) -> bool:
        with self._lock:
            if key in self._records:
                return False
            self._records[key] = record
            return True

    def release(self, key: str) -> None:
        with self._lock:
            self._records.pop(key, None)

    def records(self) -> list[dict[str, Any]]:
        with self._lock:
            return _in_order(list(self._records.values()))


class MarkerDirectory:
    """Claims of all processes that share a directory.

    Args:
        path: made where it is missing, for this user only.

    Raises:
        ChaosError: if it is not a directory of this user, or cannot be made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        _make_private(self.path)

    def claim(self, key: str, record: dict[str, Any]) -> bool:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(self.path / key, flags, 0o600)
        except FileExistsError:
            return False
        try:
            os.write(fd, json.dumps(record).encode())
        finally:
            os.close(fd)
        return True

    def release(self, key: str) -> None:
        (self.path / key).unlink(missing_ok=True)

    def records(self) -> list[dict[str, Any]]:
        found = []
        for marker in self.path.iterdir():
            with contextlib.suppress(ValueError):  # just made, or never finished
                found.append(json.loads(marker.read_bytes()))
        return _in_order(found)


def job_directory(environment: Environment) -> Path:
    """Where the markers of this job are: as the environment says, or in the temporary directory.

    There, the name is made of the job's id and address, and of the process that started this one
    (the launcher, which starts replacements too), so that a second run on the same port does not
    find the markers of the first. Those of launchers that have ended are removed.
    """
    if environment.state is not None:
        return Path(environment.state)
    root = Path(tempfile.gettempdir()) / f"outlast-chaos-{os.getuid()}"
    _make_private(root)
    launcher = _identity(os.getppid())
    for old in root.iterdir():
        pid = old.name.partition("-")[0]
        if pid.isdecimal() and not old.name.startswith(_identity(int(pid)) + "-"):
            shutil.rmtree(old, ignore_errors=True)
    digest = hashlib.sha256("\0".join(environment.job).encode()).hexdigest()[:16]
    return root / f"{launcher}-{digest}"


def _identity(pid: int) -> str:
    """The process id and the start time, which no later process of the same id shares."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return f"{pid}-gone"
    return f"{pid}-{fields.rpartition(')')[2].split()[19]}"  # the name may hold anything


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=False, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ChaosError(f"{path}: no directory for fired faults: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ChaosError(f"{path}: no directory for fired faults: is a link")
    if status.st_uid != os.getuid():
        raise ChaosError(f"{path}: no directory for fired faults: belongs to another user")
    if status.st_mode & 0o022:
        raise ChaosError(f"{path}: no directory for fired faults: others may write to it")


def _in_order(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(records, key=lambda record: float(record.get("time", 0.0)))
