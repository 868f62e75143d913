"""Checkpoints on a file system, local or shared (POSIX: ext4, xfs, NFS, Lustre, ...).

Large files bypass the page cache (`O_DIRECT`) where the file system supports that: the disk reads
the bytes from the shared-memory buffer, so a save costs training almost no CPU and does not evict
the data set from memory. Elsewhere they are written through the page cache.

A checkpoint that replaces one of the same step is exchanged with it atomically (`RENAME_EXCHANGE`).
On a file system without that, it becomes visible under a name of its own (`step-00000042-new`),
which counts more than `step-00000042`; when that is durable, the older one is hidden, and the new
one takes its name. So at every moment, and after a crash at any of them, one of the two is visible.

A rename may be reported as failed although it was made: over NFS, one that is sent again after a
lost answer finds nothing to rename. So after an error the directory itself is looked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import shutil
import stat
import threading
import uuid
from pathlib import Path

from outlast.async_checkpoint.storage.manifest import MANIFEST
from outlast.async_checkpoint.storage.protocol import (
    IDENTITY,
    NEW,
    REMOVED,
    WORKING,
    Position,
    Storage,
    check_names,
    identity_in,
    in_use,
    step_of,
)
from outlast.async_checkpoint.storage.recycled_files import RECYCLED, RecycledFiles
from outlast.async_checkpoint.storage.system_errors import check_writable, preparing
from outlast.errors import CheckpointError
from outlast.system.files import (
    FileLocked,
    fsync_folder,
    is_at,
    lock_file,
    make_folder,
    read_fully,
    replace_durably,
)

log = logging.getLogger("outlast.checkpoint")

_LOCK = ".lock"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_libc = ctypes.CDLL(None, use_errno=True)


class LocalStorage(Storage):
    """Checkpoints in one directory. See `Storage`."""

    is_cached = True

    def __init__(self, path: str) -> None:
        self.root = Path(path).expanduser().absolute()
        self.where = str(self.root)
        self._lock = -1
        self._recycled = RecycledFiles(self.root)

    def prepare(self) -> None:
        with preparing(self.root):
            make_folder(self.root)
            check_writable(self.root)

    def names_for(self, step: int, save_id: str) -> tuple[str, str]:
        final = f"step-{step:08d}"
        return f"{WORKING}{final}-{save_id}", final

    def folders(self) -> list[str]:
        if not self.root.exists():
            return []
        return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())

    def make(self, folder: str) -> None:
        path = self._inside(folder)
        try:
            path.mkdir(exist_ok=True)
        except FileNotFoundError:  # made anew, it would be without the lock
            raise CheckpointError(f"{self.root} is gone: it was moved or removed") from None

    def create(self, folder: str, name: str, size_bytes: int) -> _Writer:
        path = self._inside(folder, name)
        return _Writer(path, size_bytes, size_bytes > 0 and self._recycled.take(path, size_bytes))

    def put(self, folder: str, name: str, content: bytes) -> None:
        with open(self._inside(folder, name), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def put_record(self, folder: str, name: str, content: bytes) -> None:
        path = self._inside(folder, name)
        path.parent.mkdir(exist_ok=True)
        replace_durably(path, content)
        fsync_folder(self.root)

    def sync(self, folder: str) -> None:
        fsync_folder(self._inside(folder))

    def publish(self, working: str, final: str) -> str:
        source, target = self._inside(working), self._inside(final)
        replaced = working  # after an exchange
        try:
            _rename(source, target)
            replaced = ""
        except OSError as e:
            if e.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if not _exchange(source, target):
                return self._replace(source, target)
        self._sync_root()
        return replaced

    def settle(self) -> None:
        self._sync_root()
        self._finish_replacements()

    def open(self, folder: str, name: str) -> _Reader:
        return _Reader(self._inside(folder, name))

    def size(self, folder: str, name: str) -> int:
        return self._inside(folder, name).stat().st_size

    def sizes(self, folder: str) -> dict[str, int]:
        path = self._inside(folder)
        entries = os.scandir(path) if path.exists() else ()
        return {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}

    def saved_at(self, folder: str) -> float | None:
        for path in (self._inside(folder, MANIFEST), self._inside(folder)):
            with contextlib.suppress(OSError):
                return path.stat().st_mtime
        return None

    def recycle(self, folder: str) -> None:
        if not self._recycled.keep(self._inside(folder)):
            self.remove(folder)

    def tidy(self) -> None:
        self._recycled.drop()

    def hide(self, folder: str) -> str:
        hidden = f"{REMOVED}{folder}-{uuid.uuid4().hex[:8]}"
        try:
            _rename(self._inside(folder), self._inside(hidden))
        except FileNotFoundError:
            hidden = ""
        fsync_folder(self.root)
        return hidden

    def remove(self, folder: str) -> None:
        if folder == RECYCLED:
            self._recycled.drop()
            return
        if not folder.startswith(WORKING):
            # Hidden first: a removal that is cut short must not leave what looks complete.
            folder = self.hide(folder)
            if not folder:
                return
        path = self._inside(folder)
        if path.is_symlink():  # only the link: its target is not ours
            path.unlink()
            return
        while os.path.lexists(path):
            # Another thread may be removing it too: a missing file is no error then.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)

    def identity(self, *, create: bool = True) -> str:
        path = self.root / IDENTITY
        with contextlib.suppress(FileNotFoundError):
            found = identity_in(path.read_bytes())
            if found or not create:
                return found
            log.warning("%s is damaged: it gets a new id, and snapshots in memory are lost", path)
        if not create:
            return ""
        new = uuid.uuid4().hex
        replace_durably(path, new.encode())
        return new

    def lock(self, owner: str, *, careful: bool = False, position: Position | None = None) -> None:
        """Takes a process lock, which the kernel releases when the process ends. So a lock holder
        is always alive, and `careful` makes no difference.
        """
        text = owner if position is None else f"{owner}\n{position.signature}"

        def replaces(holder: str) -> bool:
            return position is not None and position.replaces(holder.partition("\n")[2])

        try:
            with preparing(self.root):
                path = self.root / _LOCK
                self._lock = lock_file(path, text, replaces=replaces)
        except FileLocked as e:
            holder, _, signature = str(e).partition("\n")
            raise in_use(self.where, holder, position, signature) from None
        # The caller removes what killed saves have left. A checkpoint that such a save has
        # replaced, but not durably, must not be removed before that.
        self.settle()

    def check_lock(self) -> None:
        if self._lock >= 0 and not is_at(self._lock, self.root / _LOCK):
            raise CheckpointError(
                f"{self.root} is not the folder that this job has locked: it was moved, removed or "
                "replaced, or another job has taken it over"
            )

    def unlock(self) -> None:
        lock, self._lock = self._lock, -1
        _close(lock)

    def close(self) -> None:
        self.unlock()

    def _inside(self, *names: str) -> Path:
        check_names(names, self.where)
        return self.root.joinpath(*names)

    def _replace(self, source: Path, target: Path) -> str:
        """`publish` without an atomic exchange."""
        self._finish_replacements()
        _rename(source, target.with_name(f"{target.name}{NEW}"))
        self._sync_root()
        # Committed. If the rest fails, the next `publish` or the next job does it.
        with contextlib.suppress(OSError):
            return self._finish_replacements()
        return ""

    def _finish_replacements(self) -> str:
        """Completes replacements without an exchange; returns the last directory hidden."""
        hidden = ""
        for folder in self.folders():
            if folder.endswith(NEW) and step_of(folder) is not None:
                final = folder.removesuffix(NEW)
                hidden = self.hide(final)
                _rename(self._inside(folder), self._inside(final))
                fsync_folder(self.root)
        return hidden

    def _sync_root(self) -> None:
        """Makes the names in the root durable. It is tried twice: the kernel reports an error of
        the device to one call only, and the names are still there to be written.
        """
        try:
            fsync_folder(self.root)
        except OSError:
            fsync_folder(self.root)


def _close(descriptor: int) -> None:
    """Closes a descriptor, or does nothing for -1. Linux frees it, and a lock on it, also when
    `close` reports an error (close(2)). Such an error says nothing about a checkpoint: what counts
    was synchronized before, or was verified when it was read.
    """
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _rename(source: Path, target: Path, flags: int = 0) -> None:
    """Renames a directory, or exchanges two. An `OSError` means that this has not happened."""
    moved = os.lstat(source)
    try:
        if not flags:
            os.rename(source, target)
        elif _libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(source), None, str(target))
    except OSError:
        if not (os.path.lexists(target) and os.path.samestat(os.lstat(target), moved)):
            raise


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two directories; `False` if the file system cannot."""
    try:
        _rename(one, other, _RENAME_EXCHANGE)
    except OSError as e:
        if e.errno not in _UNSUPPORTED:
            raise
        return False
    return True


class _Writer:
    """A file of known size, written by several threads. `recycled`: one of this size is there."""

    def __init__(self, path: Path, size_bytes: int, recycled: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= 0 if recycled else os.O_TRUNC
        self.direct = size_bytes % mmap.PAGESIZE == 0
        self._switching = threading.Lock()
        try:
            self._fd = os.open(path, flags | (os.O_DIRECT if self.direct else 0), 0o666)
        except OSError as e:
            if not self.direct or e.errno not in _UNSUPPORTED:
                raise
            self.direct = False
            self._fd = os.open(path, flags, 0o666)
        try:
            # A full disk fails here, and the file gets contiguous blocks.
            if size_bytes and not recycled:
                os.posix_fallocate(self._fd, 0, size_bytes)
        except OSError as e:
            if e.errno not in _UNSUPPORTED:
                self.abandon()
                raise

    def write_at(self, offset: int, data: memoryview) -> None:
        while data:
            direct = self.direct  # another thread may switch it off meanwhile
            try:
                count = os.pwrite(self._fd, data, offset)
            except OSError as e:
                if not direct or e.errno != errno.EINVAL:
                    raise
                self._switch_off_direct()
                continue
            data = data[count:]
            offset += count

    def finish(self) -> None:
        try:
            os.fsync(self._fd)
        finally:
            self.abandon()

    def abandon(self) -> None:
        fd, self._fd = self._fd, -1
        _close(fd)

    def _switch_off_direct(self) -> None:
        with self._switching:
            if self.direct:
                flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
                self.direct = False


class _Reader:
    """A file read by several threads."""

    # Measured on a virtual disk: with 4 MiB, reading and hashing takes 1.2 times as long, from the
    # disk and from the page cache.
    at_once = 512 << 10

    def __init__(self, path: Path) -> None:
        # O_NONBLOCK: opening a pipe would wait for a writer.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._fd = os.open(path, flags)
        found = os.fstat(self._fd)
        self.size_bytes = found.st_size
        if not stat.S_ISREG(found.st_mode):
            os.close(self._fd)
            raise CheckpointError(f"{path} is not a regular file")

    def read_into(self, offset: int, buffer: memoryview) -> int:
        return read_fully(self._fd, offset, buffer)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        _close(fd)
