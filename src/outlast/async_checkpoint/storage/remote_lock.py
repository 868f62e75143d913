"""The lock of a remote directory: an object, `.owner`, that names the process that holds it.

An object store has no lock that ends with its holder. A holder that is alive on this machine keeps
other jobs out. Whether one on another machine is alive cannot be known here: a warning names it,
and the lock is taken over, by an object with the next number: `.owner-00000001`.

Each object is created with a conditional put (`If-None-Match: *`), so only one process gets it. Two
processes could still create objects of different numbers, if an earlier holder removes its own
between their lists. So a process

    lists the objects,  creates its own,  lists them again

and gives up if the second list has an object that the first one had not. Of two such processes, the
one that creates its object later makes its second list after both creations. It sees the object of
the other one there, and gives up; unless its first list had that object, whose holder it has found
gone, or the other one has removed it, and with it its own claim. So, however late requests arrive,
two processes never hold the lock without one of them having found the other gone.

Some stores ignore the condition, and some file systems of fsspec have none. They are recognized by
a second creation that succeeds; a warning says that two jobs may both get the lock there.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from outlast.async_checkpoint.storage.protocol import Position, in_use
from outlast.async_checkpoint.storage.remote_files import as_os_errors
from outlast.errors import CheckpointError

log = logging.getLogger("outlast.checkpoint")

OWNER = ".owner"
_OBJECT = re.compile(rf"{re.escape(OWNER)}(?:-\d{{8,}})?")
_UNKNOWN = ("NotImplemented", "not implemented")
_REFUSED = ("PreconditionFailed", "ConditionalRequestConflict")


class RemoteLock:
    """See the module. `where` is the name of the directory in messages."""

    def __init__(self, fs: Any, root: str, where: str) -> None:
        self._fs, self._root, self._where = fs, root, where
        self._name = ""  # of this process's object, while it holds the lock
        self._token = ""
        self._conditional = _creates_exclusively(fs)

    def acquire(self, owner: str, careful: bool, position: Position | None = None) -> None:
        before = self._holders()
        for holder in before.values():
            self._check_gone(holder, careful, position)
        token = uuid.uuid4().hex
        record = {"owner": owner, "token": token, **_this_process()}
        if position is not None:
            record["position"] = position.signature
        numbers = [_number(name) for name in before]
        name = f"{OWNER}-{max(numbers) + 1:08d}" if numbers else OWNER
        content = json.dumps(record).encode()
        self._create(name, content)
        now = self._holders()
        if now.get(name, {}).get("token") != token:
            raise self._taken(now.get(name, {}))
        later = [other for other in now if other != name and now[other] != before.get(other)]
        if later:
            self._remove(name)
            raise self._taken(now[later[0]])
        self._name, self._token = name, token
        # A second creation that succeeds too: the store ignores the condition.
        if not self._conditional or self._create(name, content):
            log.warning(
                "%s cannot create an object only if there is none: two jobs that open it at the "
                "same moment may both get it",
                self._where,
            )
        for other in before:
            self._remove(other)

    def release(self) -> None:
        name, token = self._name, self._token
        self._name = self._token = ""
        # An object that cannot be removed names a process that will soon be dead.
        with suppress(OSError):
            if name and (self._holder(name) or {}).get("token") == token:
                self._remove(name)

    def _check_gone(self, holder: dict[str, Any], careful: bool, position: Position | None) -> None:
        """Raises `FolderInUse` unless the lock of this holder may be taken over."""
        if position is not None and position.replaces(str(holder.get("position"))):
            return
        alive = _alive(holder)
        if alive or (alive is None and careful):
            doubt = "" if alive else ", as far as one can know from here"
            raise in_use(self._where, _owner(holder), position, str(holder.get("position")), doubt)
        if alive is None:
            log.warning(
                "%s was last used by another job (%s) on another machine, which did not "
                "release it: taken over, assuming that the job is dead",
                self._where,
                _owner(holder),
            )

    def _taken(self, other: dict[str, Any]) -> CheckpointError:
        return CheckpointError(f"{self._where} was taken by another job ({_owner(other)}) just now")

    def _create(self, name: str, content: bytes) -> bool:
        """Creates an object; returns `False` if there is one. That may be its own: a request is
        sent again after a lost answer. A store without conditional puts writes over what is there.
        """
        path = f"{self._root}/{name}"
        with as_os_errors(f"{self._where}/{name}"):
            if self._conditional:
                try:
                    self._fs.pipe_file(path, content, mode="create")
                except Exception as e:
                    if isinstance(e, FileExistsError) or _has_code(e, *_REFUSED):
                        return False
                    if not _has_code(e, *_UNKNOWN):
                        raise
                    self._conditional = False
                else:
                    return True
            self._fs.pipe_file(path, content)
        return True

    def _remove(self, name: str) -> None:
        with as_os_errors(f"{self._where}/{name}"), suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{name}")

    def _holders(self) -> dict[str, dict[str, Any]]:
        """The contents of all objects of the lock, by name; empty ones if they are unreadable."""
        entries: list[dict[str, Any]] = []
        with as_os_errors(self._where), suppress(FileNotFoundError):
            self._fs.invalidate_cache(self._root)
            entries = self._fs.ls(self._root, detail=True)
        names = [str(entry["name"]).rsplit("/", 1)[-1] for entry in entries]
        found = {name: self._holder(name) for name in names if _OBJECT.fullmatch(name)}
        return {name: holder for name, holder in found.items() if holder is not None}

    def _holder(self, name: str) -> dict[str, Any] | None:
        """The content of an object: `None` if there is none, empty if it is unreadable."""
        with as_os_errors(f"{self._where}/{name}"):
            try:
                content = self._fs.cat_file(f"{self._root}/{name}")
            except FileNotFoundError:
                return None
        with suppress(ValueError):
            found = json.loads(content)
            if isinstance(found, dict):
                return found
        return {}


def _creates_exclusively(fs: Any) -> bool:
    """Whether fsspec's file system can create a file only if there is none, in one step."""
    from fsspec.spec import AbstractFileSystem

    method = getattr(type(fs), "_pipe_file", type(fs).pipe_file)
    default = method is AbstractFileSystem.pipe_file
    return not default and "mode" in inspect.signature(method).parameters


def _has_code(error: Exception, *codes: str) -> bool:
    texts = str(error), str(error.__cause__)  # s3fs keeps the code only in the cause
    return any(code in text for code in codes for text in texts)


def _number(name: str) -> int:
    return int(name.removeprefix(OWNER).lstrip("-") or 0)


def _owner(holder: dict[str, Any]) -> str:
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
