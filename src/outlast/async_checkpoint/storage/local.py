"""Checkpoints on a file system, local or shared (POSIX: ext4, xfs, NFS, Lustre, ...).

Large files bypass the page cache (`O_DIRECT`) where the file system supports that: the disk reads
the bytes from the shared-memory buffer, so a save costs training almost no CPU and does not evict
the data set from memory. Elsewhere they are written through the page cache.

A checkpoint that replaces one of the same step is exchanged with it atomically (`RENAME_EXCHANGE`).
On a file system without that, there is a moment in which the step has no checkpoint, but never a
partial one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import stat
import threading
import uuid
from pathlib import Path

from outlast.async_checkpoint.storage.manifest import MANIFEST
from outlast.async_checkpoint.storage.position import Position
from outlast.async_checkpoint.storage.protocol import IDENTITY, REMOVED, STATES, STEP, step_of
from outlast.async_checkpoint.storage.recycled_files import RECYCLED, RecycledFiles
from outlast.errors import CheckpointError, FolderInUse
from outlast.system.files import FileLocked, fsync_folder, lock_file

WORKING = ".tmp-"
_LOCKS = {STEP: ".lock", STATES: ".states.lock"}
_ASIDE = "-old"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_libc = ctypes.CDLL(None, use_errno=True)


class LocalStorage:
    """Checkpoints in one directory. See `Storage`."""

    def __init__(self, path: str, prefix: str = STEP) -> None:
        self.prefix = prefix
        self.root = Path(path).expanduser().absolute()
        self.where = str(self.root)
        self._lock = -1
        self._recycled = RecycledFiles(self.root)

    def prepare(self) -> None:
        missing = [p for p in (self.root, *self.root.parents) if not p.exists()]
        self.root.mkdir(parents=True, exist_ok=True)
        for made in missing:
            fsync_folder(made.parent)

    def names_for(self, step: int, save_id: str) -> tuple[str, str]:
        final = f"{self.prefix}-{step:08d}"
        return f"{WORKING}{final}-{save_id}", final

    def folders(self) -> list[str]:
        if not self.root.exists():
            return []
        return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())

    def make(self, folder: str) -> None:
        os.makedirs(self._inside(folder), exist_ok=True)

    def create(self, folder: str, name: str, size_bytes: int) -> _Writer:
        path = self._inside(folder, name)
        return _Writer(path, size_bytes, size_bytes > 0 and self._recycled.take(path, size_bytes))

    def put(self, folder: str, name: str, content: bytes) -> None:
        with open(self._inside(folder, name), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def sync(self, folder: str) -> None:
        fsync_folder(self._inside(folder))

    def publish(self, working: str, final: str) -> None:
        source, target = self._inside(working), self._inside(final)
        try:
            os.rename(source, target)
        except OSError as e:
            if e.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            self._replace(source, target)
            fsync_folder(self.root)
            self.remove(working)  # it holds the replaced checkpoint now
        fsync_folder(self.root)

    def get(self, folder: str, name: str) -> bytes:
        return self._inside(folder, name).read_bytes()

    def open(self, folder: str, name: str) -> _Reader:
        return _Reader(self._inside(folder, name))

    def size(self, folder: str, name: str) -> int:
        return self._inside(folder, name).stat().st_size

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
            os.rename(self._inside(folder), self._inside(hidden))
        except FileNotFoundError:
            return ""
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

    def identity(self) -> str:
        path = self.root / IDENTITY
        try:
            return path.read_text()
        except FileNotFoundError:
            path.write_text(uuid.uuid4().hex)
            return path.read_text()

    def lock(self, owner: str, *, careful: bool = False, position: Position | None = None) -> None:
        """Takes a process lock, which the kernel releases when the process ends. So a lock holder
        is always alive, and `careful` makes no difference.
        """
        path = self.root / _LOCKS[self.prefix]
        try:
            if position is None:
                self._lock = lock_file(path, owner)
            else:
                text = f"{owner}\n{position.signature}"
                self._lock = lock_file(
                    path, text, replaces=lambda s: position.replaces(s.partition("\n")[2])
                )
        except FileLocked as e:
            holder = str(e).partition("\n")[0] or "which left no name"
            raise FolderInUse(
                f"{self.where} is in use by another job ({holder}); two jobs that save into one "
                "folder would overwrite each other's checkpoints"
            ) from None
        self._recover()

    def _recover(self) -> None:
        """Puts back a checkpoint that was moved aside by a job that died while replacing the
        checkpoint on a file system without an atomic exchange.
        """
        for folder in self.folders():
            if folder.startswith(WORKING) and folder.endswith(_ASIDE):
                final = "-".join(folder.removeprefix(WORKING).split("-")[:2])
                if step_of(final, self.prefix) is not None and not (self.root / final).exists():
                    os.rename(self.root / folder, self.root / final)
                    fsync_folder(self.root)

    def unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def close(self) -> None:
        self.unlock()

    def _inside(self, *names: str) -> Path:
        for name in names:
            if not name or "/" in name or name in (".", ".."):
                raise CheckpointError(f"{name!r} is not a valid file name in {self.where}")
        return self.root.joinpath(*names)

    def _replace(self, source: Path, target: Path) -> None:
        paths = (os.fsencode(source), os.fsencode(target))
        done = _libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)
        if done == 0:
            return
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number), str(source), None, str(target))
        aside = source.with_name(f"{source.name}{_ASIDE}")
        os.rename(target, aside)
        os.rename(source, target)
        os.rename(aside, source)


class _Writer:
    """A file of known size, written by several threads. `recycled`: a file of this size is at
    `path`.
    """

    def __init__(self, path: Path, size_bytes: int, recycled: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= 0 if recycled else os.O_TRUNC
        self.direct = size_bytes % mmap.PAGESIZE == 0
        self._switching = threading.Lock()
        try:
            self._fd = os.open(path, flags | (os.O_DIRECT if self.direct else 0), 0o644)
        except OSError as e:
            if not self.direct or e.errno not in _UNSUPPORTED:
                raise
            self.direct = False
            self._fd = os.open(path, flags, 0o644)
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
        if fd >= 0:
            os.close(fd)

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
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise CheckpointError(f"{path} is not a regular file")

    def read_into(self, offset: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], offset + done)
            if not count:
                break
            done += count
        return done

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
