"""Where checkpoints are kept, as a protocol: a folder of folders of files.

`LocalStorage` is a file system, local or shared; `RemoteStorage` anything that fsspec knows. They
differ in how a checkpoint becomes visible. A file system has an atomic rename: everything is
written into a folder under a temporary name, which is then renamed. An object store has none:
there the files are put in place, and the manifest last; a folder without one is no checkpoint.

Nothing here imports torch.
"""

from __future__ import annotations

import re
from typing import Protocol

__all__ = ["IDENTITY", "FileReader", "FileWriter", "Storage", "open_storage", "step_of"]

IDENTITY = ".id"
"""The file that `Storage.identity` is in."""

_STEP = re.compile(r"step-(\d+)(?:-[0-9a-f]+)?")


class FileWriter(Protocol):
    """A file that is being written, from several threads at once."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Writes `data`, at the latest in `finish`: what `data` looks at must stay as it is until
        then. Pieces come in any order, and each but the last is of equal length.
        """
        ...

    def finish(self) -> None:
        """Returns when the file is durable."""
        ...

    def abandon(self) -> None:
        """Gives up. On a file system what was written may stay behind, until its folder is
        removed; elsewhere nothing does.
        """
        ...


class FileReader(Protocol):
    """A file that is being read, from several threads at once.

    Attributes:
        at_once: bytes that are worth asking for at once: few, where they come from this machine's
            memory or its disk, so that they are still in the cache when they are hashed.
    """

    at_once: int

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fills `buffer` from `offset` on; returns how much there was."""
        ...

    def close(self) -> None:
        """Closes the file."""
        ...


class Storage(Protocol):
    """What a checkpointer needs. Names have no slashes. Errors are `OSError`.

    Attributes:
        where: what to call it in messages.
    """

    where: str

    def prepare(self) -> None:
        """Makes the folder that everything is kept in."""
        ...

    def names_for(self, step: int, save_id: str) -> tuple[str, str]:
        """The folder in which a save is written, and the one in which it is found when it is
        committed. They are the same where nothing can be renamed.
        """
        ...

    def folders(self) -> list[str]:
        """The names of all folders, also of those that hold no whole checkpoint. Where one step can
        have several, the one that was committed last comes last.
        """
        ...

    def make(self, folder: str) -> None:
        """Makes a folder; it may be there."""
        ...

    def create(self, folder: str, name: str, size_bytes: int) -> FileWriter:
        """Begins a file of known size."""
        ...

    def put(self, folder: str, name: str, content: bytes) -> None:
        """Writes a small file, durably."""
        ...

    def sync(self, folder: str) -> None:
        """Returns when the folder's entries are durable."""
        ...

    def publish(self, working: str, final: str) -> None:
        """Makes what was written under `working` visible as `final`, atomically and durably. Where
        they are the same, it became so with its manifest, and this tidies up.
        """
        ...

    def get(self, folder: str, name: str) -> bytes:
        """The content of a small file; `FileNotFoundError` if there is none."""
        ...

    def open(self, folder: str, name: str) -> FileReader:
        """Opens a file for reading; `FileNotFoundError` if there is none."""
        ...

    def size(self, folder: str, name: str) -> int:
        """Bytes of a file; `FileNotFoundError` if there is none."""
        ...

    def hide(self, folder: str) -> str:
        """Has a checkpoint be none any more, at once and for good: what lies in it is still there.

        Returns:
            What `remove` is to be told then, whatever has the checkpoint's name by that time; an
            empty string if there is nothing.
        """
        ...

    def remove(self, folder: str) -> None:
        """Removes a folder with all that is in it, so that at no moment a part of it could be
        taken for a checkpoint. It need not be there.
        """
        ...

    def recycle(self, folder: str) -> None:
        """As `remove`, of what was hidden; but what is of use to the next save may stay until
        `tidy`.
        """
        ...

    def tidy(self) -> None:
        """Removes what `recycle` has kept."""
        ...

    def identity(self) -> str:
        """What tells this place from another that has the same name later, once that is emptied;
        made when it is missing, by who has the lock.
        """
        ...

    def lock(self, owner: str, *, careful: bool = False) -> None:
        """Keeps other jobs out, until `unlock`.

        Args:
            owner: what others are told.
            careful: whether a job of which nobody can say if it is alive keeps this one out.

        Raises:
            CheckpointError: naming who has it.
        """
        ...

    def unlock(self) -> None:
        """Lets other jobs in."""
        ...

    def close(self) -> None:
        """Gives back what it holds: the lock, connections. It may still be used afterwards."""
        ...


def step_of(folder: str) -> int | None:
    """The step whose committed checkpoint a folder of this name would be."""
    match = _STEP.fullmatch(folder)
    return int(match[1]) if match else None


def open_storage(url: str) -> Storage:
    """The storage at `url`: a path, `file://` and a path, or what fsspec takes.

    Raises:
        ModuleNotFoundError: saying what to install, when fsspec or its part for this URL is not.
        ValueError: for a kind of URL that nobody knows.
    """
    from outlast.async_checkpoint.storage.local import LocalStorage

    if "://" not in url:
        return LocalStorage(url)
    if url.startswith("file://"):
        return LocalStorage(url.removeprefix("file://"))
    from outlast.async_checkpoint.storage.remote import RemoteStorage

    return RemoteStorage(url)
