"""Recycled files: the next save writes over the files of the checkpoint that was removed last.

To remove a file, the file system frees its blocks and often notifies the disk (discard); to create
one, it allocates blocks again. Where every save removes an old checkpoint, that took a third of the
disk's time for saves (ext4 with `discard`, on a virtual disk). Writing over a file costs neither.

A checkpoint must not change while its files are still in use. So a file is written over only if

- its checkpoint was hidden before, durably (`LocalStorage.hide`): it can no longer be found, even
  after a power failure;
- it has no other name: no backup has a hard link to it;
- no process has it open or mapped: the kernel grants a lease, which it grants only to the only
  user of a file;
- it is on ext4 or xfs, which other hosts do not mount. (A reader through an NFS server on this host
  is seen only while the server has the file open for it.)

Otherwise the file is removed and a new one is created. Each rank takes the file of its own name, by
a rename, so two ranks never get the same file.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import shutil
import signal
import stat
from pathlib import Path

RECYCLED = ".tmp-spare"
"""The directory that holds the recycled files."""

_FILE_SYSTEMS = ("ext4", "xfs")


class RecycledFiles:
    """The recycled files of a directory of checkpoints."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = root / RECYCLED

    def keep(self, folder: Path) -> bool:
        """Keeps the files of the hidden `folder` alone, if it can; returns whether it did."""
        try:
            # A symbolic link may lead to files outside the storage.
            if not self._supported or not stat.S_ISDIR(os.lstat(folder).st_mode):
                return False
            self.drop()
            os.rename(folder, self._folder)
        except OSError:  # the caller removes the directory, or reports why it cannot
            return False
        return True

    def take(self, path: Path, size_bytes: int) -> bool:
        """Moves a recycled file of the same name and size to `path`, if there is one: its blocks
        are allocated, and its content may be overwritten. Returns whether it did; an `OSError` if
        what it moved is unusable and stays there.
        """
        try:
            os.rename(self._folder / path.name, path)
        except OSError:  # usually there is none; the save does not need one
            return False
        if _is_ours_alone(path, size_bytes):
            return True
        path.unlink()
        return False

    def drop(self) -> None:
        """Removes all recycled files, unless other ranks take them first.

        Only rank 0 puts files there, and only rank 0 removes the directory at its end. Another rank
        that needs room on the disk may remove the files at any time; new ones stay.
        """
        if self._folder.is_symlink():
            self._folder.unlink()
            return
        try:
            found = os.listdir(self._folder)
        except FileNotFoundError:
            return
        for name in found:
            path = self._folder / name
            if path.is_dir() and not path.is_symlink():  # a user's: no checkpoint has any
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        try:
            os.rmdir(self._folder)
        except OSError as e:
            if e.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise

    @functools.cached_property
    def _supported(self) -> bool:
        return _file_system(self._root) in _FILE_SYSTEMS


def _is_ours_alone(path: Path, size_bytes: int) -> bool:
    try:
        # Opening a pipe would wait for a writer; a link leads elsewhere.
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        if (
            not stat.S_ISREG(found.st_mode)
            or not found.st_mode & stat.S_IWUSR  # write-protected
            or found.st_uid != os.geteuid()
            or found.st_nlink != 1
            or found.st_size != size_bytes
            or found.st_blocks * 512 < size_bytes
        ):
            return False
        # A process that opens the file while the lease is held waits until the lease is released,
        # and the kernel sends this process a signal: by default SIGIO, which would kill it;
        # SIGWINCH is ignored.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGWINCH)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:  # another process has it open, or the file system has no leases
        return False
    finally:
        os.close(fd)
    return True


def _file_system(path: Path) -> str:
    """The type of the file system of `path`; an empty string if it is unknown."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:  # "36 35 98:0 /root /mount options [...] - type source options"
        mount, _, of = line.partition(" - ")
        if mount.split()[2] == number:
            return of.split()[0]
    return ""
