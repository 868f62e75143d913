"""The storage protocol: a directory of checkpoint directories of files.

`LocalStorage` is a file system, local or shared; `RemoteStorage` is anything that fsspec supports.
They differ in how a checkpoint becomes visible. A file system has an atomic rename: a save writes
everything under a temporary name, which is then renamed. An object store has none: a save puts the
files in their final place and the manifest last; a directory without one is not a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from contextlib import closing
from typing import Protocol

from outlast.errors import CheckpointError, FolderInUse

IDENTITY = ".id"
"""The file that holds `Storage.identity`."""
SMALL_FILE_BYTES = 16 << 20
"""The size of the largest record beside the checkpoints."""
WORKING = ".tmp-"
"""How the name of a directory begins that is not a checkpoint, or not any more."""
REMOVED = f"{WORKING}removed-"
"""How the name of a checkpoint begins that was made invisible, until its files are deleted."""
NEW = "-new"
"""How the name of a checkpoint ends while it replaces an older one of its step."""

_COMMITTED = re.compile(rf"step-(\d+)(?:-[0-9a-f]+|{NEW})?")
_IDENTITY = re.compile(rb"[0-9a-f]{32}")


class FileWriter(Protocol):
    """A file being written, by several threads at once."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Writes `data` now or in `finish`: the memory must not change until `finish` returns.
        Pieces arrive in any order, and all but the last have the same length.
        """

    def finish(self) -> None:
        """Returns when the file is durable."""

    def abandon(self) -> None:
        """Stops writing. Only on a file system does what was written stay, in its directory."""


class FileReader(Protocol):
    """A file being read, by several threads at once. `at_once` is how many bytes to request at
    once: few for local memory or disk, so that the bytes are still in the cache when they are
    hashed. `size_bytes` is its size when it was opened.
    """

    at_once: int
    size_bytes: int

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fills `buffer` with the bytes from `offset`; returns how many there were."""

    def close(self) -> None: ...


class Storage(Protocol):
    """What a checkpointer needs. Names have no slashes. Errors are `OSError`; those of `get`,
    `open` and `size` are `FileNotFoundError` if the file does not exist. `where` is for messages.
    """

    where: str
    is_cached: bool  # whether a host that reads a file again reads it from its own memory

    def prepare(self) -> None: ...

    def names_for(self, step: int, save_id: str) -> tuple[str, str]:
        """The directories of a save and of its checkpoint: the same where there is no rename."""

    def folders(self) -> list[str]:
        """The names of all directories. Of several of one step, the last committed is last."""

    def make(self, folder: str) -> None:
        """Creates a directory, which may exist."""

    def create(self, folder: str, name: str, size_bytes: int) -> FileWriter: ...

    def put(self, folder: str, name: str, content: bytes) -> None:
        """Writes a small file of a save; its name is durable after `sync`."""

    def put_record(self, folder: str, name: str, content: bytes) -> None:
        """Writes a small file of no save: durably, in one step. Creates the directory."""

    def sync(self, folder: str) -> None:
        """Returns when the directory's entries are durable."""

    def publish(self, working: str, final: str) -> str:
        """Makes what was written under `working` visible as `final`, atomically and durably, and
        returns the directory that now has the checkpoint that it replaced, for `recycle`; empty if
        there is none. If both are the same directory, its manifest has made it visible, and this
        call only removes checkpoints that were replaced before. After an `OSError`, it is not
        visible, or may not be durable: see `settle`.
        """

    def settle(self) -> None:
        """Makes durable what is visible now, and what a `publish` that was cut short has done."""

    def get(self, folder: str, name: str) -> bytes:
        """The content of a small file; a `CheckpointError` for a larger or irregular one."""
        with closing(self.open(folder, name)) as reader:
            size = reader.size_bytes
            if size > SMALL_FILE_BYTES:
                raise CheckpointError(
                    f"{self.where}/{folder}/{name} has {size} bytes: it is no record"
                )
            return read_bytes(reader, 0, size)

    def open(self, folder: str, name: str) -> FileReader: ...

    def size(self, folder: str, name: str) -> int: ...

    def sizes(self, folder: str) -> dict[str, int]:
        """The sizes of all files of a directory, by name; none if it does not exist."""

    def hide(self, folder: str) -> str:
        """Makes a checkpoint invisible, durably; its files stay. Returns the directory to pass to
        `remove` later, even if a new checkpoint has taken the old name; empty if there was none.
        """

    def remove(self, folder: str) -> None:
        """Removes a directory, if it is there; at no moment is a part of it a checkpoint."""

    def recycle(self, folder: str) -> None:
        """As `remove`, of a hidden directory; may keep files to write over, until `tidy`."""

    def saved_at(self, folder: str) -> float | None:
        """When the manifest of a checkpoint was written, or, without one, when its directory was
        last changed: seconds since 1970, by the storage's clock, if it says.
        """

    def tidy(self) -> None: ...

    def identity(self, *, create: bool = True) -> str:
        """A random id of this storage, which changes when the storage is emptied and used again
        under the same name. Created if missing or damaged; call with the lock held. Without
        `create`, it is empty then.
        """

    def lock(self, owner: str, *, careful: bool = False, position: Position | None = None) -> None:
        """Locks the storage against other jobs, whose errors name `owner`, until `unlock`. A
        `CheckpointError` names the job that holds the lock; `careful` also refuses if it cannot be
        known whether that is alive. With a `position`, the lock of a process that was at an earlier
        position of the job is taken over.
        """

    def check_lock(self) -> None:
        """Raises a `CheckpointError` unless the storage that is locked still has this name."""
        return

    def unlock(self) -> None: ...

    def close(self) -> None:
        """Releases the lock and the connections. The storage may be used again afterwards."""


def check_names(names: Iterable[str], where: str, forbidden: str = "/") -> None:
    """Raises `CheckpointError` for a name that leads out of its directory."""
    for name in names:
        if name in ("", ".", "..") or any(character in name for character in forbidden):
            raise CheckpointError(f"{name!r} is not a valid file name in {where}")


def in_use(
    where: str, owner: str, position: Position | None, signature: str, doubt: str = ""
) -> FolderInUse:
    """The error of `Storage.lock`: `owner` holds the lock, and wrote `signature` into it."""
    return FolderInUse(
        f"{where} is in use by another job ({owner or 'which left no name'}){doubt}; two jobs that "
        "save into one folder would overwrite or remove each other's checkpoints",
        another_group=position is not None and position.in_another_group(signature),
    )


def identity_in(content: bytes) -> str:
    """The id in the content of the file `IDENTITY`; empty if it is damaged."""
    return content.decode() if _IDENTITY.fullmatch(content) else ""


def read_bytes(reader: FileReader, offset: int, size_bytes: int) -> bytes:
    """At most `size_bytes` from `offset`: fewer at the end of the file."""
    buffer = memoryview(bytearray(size_bytes))
    return bytes(buffer[: reader.read_into(offset, buffer)])


def step_of(folder: str) -> int | None:
    """The step of the committed checkpoint that a directory of this name would hold."""
    match = _COMMITTED.fullmatch(folder)
    return int(match[1]) if match else None


def is_temporary(folder: str) -> bool:
    """Whether a directory of this name belongs to an unfinished save or removal."""
    return folder.startswith(WORKING)


@dataclasses.dataclass(frozen=True)
class Position:
    """A position in a job on many hosts.

    Attributes:
        run: identifies the job. What is before a `-` is the same in two groups of hosts that run
            one job at the same time because they could not find each other.
        order: attempt, call and iteration; later ones compare greater.
        lease: the path of the host's lease page.
    """

    run: str
    order: tuple[int, ...]
    lease: str = ""

    def precedes(self, run: str, order: Iterable[int]) -> bool:
        """Whether this later position is one of the same job."""
        return run == self.run and tuple(order) > self.order

    def replaces(self, holder: str) -> bool:
        """Whether the process that wrote this `signature` into a lock is an earlier one of the job.

        All processes that take part in the job now have opened the storage together, and the one
        that held the lock before has released it: so this one takes part no longer.
        """
        run, order = _run_and_order(holder)
        return bool(order) and run == self.run and order < self.order

    def in_another_group(self, holder: str) -> bool:
        """Whether another group of the hosts of this run wrote it. One ends when they meet."""
        job, separator, group = _run_and_order(holder)[0].partition("-")
        own, _, mine = self.run.partition("-")
        return bool(separator) and job == own and group != mine

    @property
    def signature(self) -> str:
        return json.dumps({"run": self.run, "order": self.order})


def _run_and_order(holder: str) -> tuple[str, tuple[int, ...]]:
    """The run and the order in a signature; empty if it is none."""
    try:
        found = json.loads(holder)
        return str(found["run"]), tuple(int(number) for number in found["order"])
    except (ValueError, KeyError, TypeError):
        return "", ()
