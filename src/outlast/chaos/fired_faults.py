"""Records which faults have fired, so that each fires once per job across replaced processes.

A process claims a fault before it fires it, with a marker file that only one process can create
(`O_EXCL`); the claim outlives the process. A marker contains, as JSON, what fired, where and when.
At the end of a job, `planned_events` tells which faults of its plan have fired, and which never
came due. Where the markers are, the environment says: `Environment` is all that fault injection
reads of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

from outlast.chaos.plan import Plan
from outlast.errors import ChaosError
from outlast.events.types import PlannedFault


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """Settings from environment variables."""

    plan: str | None  # the path of the plan (`OUTLAST_CHAOS`)
    state: str | None  # the directory of the records of fired faults (`OUTLAST_CHAOS_STATE`)
    rank: int | None  # the rank that the launcher gave this process
    job: tuple[str, ...]  # values that identify this job among others on the same machine
    store_port: int | None = None  # the port of the job's store (`MASTER_PORT`)

    @classmethod
    def read(cls) -> Environment:
        rank, port = os.environ.get("RANK", ""), os.environ.get("MASTER_PORT", "")
        names = ("OUTLAST_JOB", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        return cls(
            plan=os.environ.get("OUTLAST_CHAOS") or None,
            state=os.environ.get("OUTLAST_CHAOS_STATE") or None,
            rank=int(rank) if rank.isdecimal() else None,
            store_port=int(port) if port.isdecimal() else None,
            job=tuple(os.environ.get(name, "") for name in names),
        )


class MarkerDirectory:
    """Claims of all processes that share a directory. A `ChaosError` says if it is not,
    and cannot be made, private to this user.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        _make_private_directory(self.path)

    def claim(self, key: str, record: dict[str, Any]) -> bool:
        """Claims the fault `key`, with a record of where it fires; false if already claimed."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            fd = os.open(self.path / key, flags, 0o600)
        except FileExistsError:
            return False
        with open(fd, "wb", buffering=0) as file:
            file.write(json.dumps(record).encode())
        return True

    def release(self, key: str) -> None:
        """Withdraws a claim: the fault did not fire."""
        (self.path / key).unlink(missing_ok=True)

    def records(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for marker in self.path.iterdir():
            with contextlib.suppress(ValueError):  # not yet written, or the writer died
                found.append(json.loads(marker.read_bytes()))
        return sorted(found, key=lambda record: float(record.get("time", 0.0)))


def job_directory(environment: Environment) -> Path:
    """The directory of this job's markers: `OUTLAST_CHAOS_STATE`, or a temporary one.

    Its name contains the job's ID, address and parent process (the launcher, which also starts
    replacements), so that a second run on the same port does not find the markers of the first.
    Directories of launchers that have ended are removed.
    """
    if environment.state is not None:
        return Path(environment.state)
    root = Path(tempfile.gettempdir()) / f"outlast-chaos-{os.getuid()}"
    _make_private_directory(root)
    launcher = identity(os.getppid())
    for old in root.iterdir():
        pid = old.name.partition("-")[0]
        if pid.isdecimal() and not old.name.startswith(identity(int(pid)) + "-"):
            shutil.rmtree(old, ignore_errors=True)
    digest = hashlib.sha256("\0".join(environment.job).encode()).hexdigest()[:16]
    return root / f"{launcher}-{digest}"


def identity(pid: int) -> str:
    """The process id and start time, which together are never reused."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return f"{pid}-gone"
    # Fields are counted after the process name, which may contain spaces and parentheses.
    return f"{pid}-{fields.rpartition(')')[2].split()[19]}"


def planned_events(plan: Path, state: Path) -> list[PlannedFault]:
    """One event for each planned fault, and for each random one that fired; `state` is the
    directory of the fired faults, after the end of the job.
    """
    records = {record["key"]: record for record in MarkerDirectory(state).records() if record}
    planned = {f"planned-{index}": fault for index, fault in enumerate(Plan.load(plan).faults)}
    events = [
        PlannedFault(key=key, name=fault.kind.value, rank=fault.rank, due=fault.conditions)
        for key, fault in planned.items()
        if key not in records
    ]
    for key, record in records.items():
        fired = {name: record[name] for name in ("key", "rank", "iteration", "host", "pid", "time")}
        due = planned[key].conditions if key in planned else "random"
        events.append(PlannedFault(**fired, name=record["kind"], due=due, fired=True))
    return events


def _make_private_directory(path: Path) -> None:
    refused = "cannot be the directory of fired faults"
    try:
        path.mkdir(mode=0o700, parents=False, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ChaosError(f"{path}: {refused}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ChaosError(f"{path}: {refused}: it is a link")
    if status.st_uid != os.getuid():
        raise ChaosError(f"{path}: {refused}: another user owns it")
    if status.st_mode & 0o022:
        raise ChaosError(f"{path}: {refused}: others can write to it")
