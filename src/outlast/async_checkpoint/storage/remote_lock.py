"""The lock of a remote directory: an object, `.owner`, that names the process that holds it.

An object store has no lock that ends with its holder. A holder that is alive on this machine keeps
other jobs out. Whether one on another machine is alive cannot be known here: a warning names it,
and the lock is taken over.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from outlast.async_checkpoint.storage.position import Position
from outlast.async_checkpoint.storage.remote_files import as_os_errors
from outlast.errors import CheckpointError, FolderInUse

log = logging.getLogger("outlast.checkpoint")

OWNER = ".owner"


class RemoteLock:
    """See the module. `where` is the name of the directory in messages."""

    def __init__(self, fs: Any, root: str, where: str) -> None:
        self._fs = fs
        self._path = f"{root}/{OWNER}"
        self._where = where
        self._token = ""

    def acquire(self, owner: str, careful: bool, position: Position | None = None) -> None:
        """See `Storage.lock`."""
        other = self._holder()
        earlier = position is not None and position.replaces(str((other or {}).get("position")))
        if other is not None and not earlier:
            alive = _alive(other)
            if alive or (alive is None and careful):
                doubt = "" if alive else ", as far as one can know from here"
                raise FolderInUse(
                    f"{self._where} is in use by another job ({_name(other)}){doubt}; two jobs "
                    "that save into one folder would remove each other's checkpoints"
                )
            if alive is None:
                log.warning(
                    "%s was last used by another job (%s) on another machine, which did not "
                    "release it: taken over, assuming that the job is dead",
                    self._where,
                    _name(other),
                )
        self._token = uuid.uuid4().hex
        said = {"owner": owner, "token": self._token, **_this_process()}
        if position is not None:
            said["position"] = position.signature
        with as_os_errors(f"{self._where}/{OWNER}"):
            self._fs.pipe_file(self._path, json.dumps(said).encode())
        other = self._holder() or {}
        if other.get("token") != self._token:
            self._token = ""
            raise CheckpointError(
                f"{self._where} was taken by another job ({_name(other)}) just now"
            )

    def release(self) -> None:
        """Removes the object if it still names this process."""
        token, self._token = self._token, ""
        # An object that cannot be removed names a process that will soon be dead.
        with suppress(OSError):
            if token and (self._holder() or {}).get("token") == token:
                with as_os_errors(f"{self._where}/{OWNER}"):
                    self._fs.rm_file(self._path)

    def _holder(self) -> dict[str, Any] | None:
        """The content of the object: `None` if there is none, empty if it is unreadable."""
        with as_os_errors(f"{self._where}/{OWNER}"):
            try:
                content = self._fs.cat_file(self._path)
            except FileNotFoundError:
                return None
        with suppress(ValueError):
            found = json.loads(content)
            if isinstance(found, dict):
                return found
        return {}


def _name(holder: dict[str, Any]) -> str:
    return str(holder.get("owner") or "which left no name")


def _this_process() -> dict[str, Any]:
    """Identifies this process, and the machine and PID namespace in which it can be seen."""
    return {
        "host": socket.gethostname(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pids": os.readlink("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "began": psutil.Process().create_time(),
    }


def _alive(holder: dict[str, Any]) -> bool | None:
    """Whether the process is alive; `None` where that cannot be known."""
    here = _this_process()
    if any(holder.get(key) != here[key] for key in ("host", "boot", "pids")):
        return None
    try:
        process = psutil.Process(int(holder["pid"]))
        began = process.create_time()
        if process.status() == psutil.STATUS_ZOMBIE:  # killed, and not reaped yet
            return False
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False
    return bool(abs(began - float(holder.get("began", -1))) < 1.0)  # PIDs are reused
