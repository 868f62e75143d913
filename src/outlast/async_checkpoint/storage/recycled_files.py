"""The files of the checkpoint that was removed last: the next save writes over them.

To remove a file means to have the file system free its blocks, and often to have it tell the disk
so; to make one means to allocate them again. Where every save removes an old checkpoint, that took
a third of the time that the disk had for saves (ext4 with `discard`, on a virtual disk). A file
that is written over costs neither.

Nobody may see his checkpoint change under his eyes. So a file is written over only if

- its checkpoint has been taken out of sight before, durably (`LocalStorage.hide`): nobody finds it
  any more, and it would not be found after a loss of power either;
- it has no other name: no backup is linked to it;
- nobody has it open or mapped, who is still reading: the kernel says so, by granting a lease that
  it grants to the only user of a file;
- it lies on ext4 or xfs, which other hosts do not mount. (One that reads it through an NFS server
  on this host is seen only while the server has the file open for it.)

Otherwise it is removed, and a new one made. Each rank finds the file of its own name, and takes it
by renaming it; so no two ranks ever have the same one.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import signal
import stat
from pathlib import Path

__all__ = ["SPARE", "Spares"]

SPARE = ".tmp-spare"
"""The folder that they lie in."""

_FILE_SYSTEMS = ("ext4", "xfs")


class Spares:
    """Spare files below a folder of checkpoints.

    Args:
        root: that folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = root / SPARE

    def keep(self, folder: Path) -> bool:
        """Keeps what lies in `folder`, which nobody finds any more, instead of what was kept
        before. Says whether it has; otherwise it is still there.
        """
        try:
            # What a link leads to is somebody else's.
            if not self._usable or not stat.S_ISDIR(os.lstat(folder).st_mode):
                return False
            self.drop()
            os.rename(folder, self._folder)
        except OSError:  # it can be removed all the same, or that tells what is wrong
            return False
        return True

    def take(self, path: Path, size_bytes: int) -> bool:
        """Has a file of the name and the size of `path` stand there, if there is one to spare: its
        blocks are allocated, and what lies in them is of no use to anybody.

        Raises:
            OSError: if one that cannot be used cannot be taken away again.
        """
        try:
            os.rename(self._folder / path.name, path)
        except OSError:  # there is none, mostly; a save does without, whatever it is
            return False
        if _is_ours_alone(path, size_bytes):
            return True
        path.unlink()
        return False

    def drop(self) -> None:
        """Removes them all."""
        while os.path.lexists(self._folder):
            if self._folder.is_symlink():
                self._folder.unlink()
                return
            try:
                shutil.rmtree(self._folder)
            except FileNotFoundError:
                continue  # another rank has just taken one

    @functools.cached_property
    def _usable(self) -> bool:
        return _file_system(self._root) in _FILE_SYSTEMS


def _is_ours_alone(path: Path, size_bytes: int) -> bool:
    try:
        # A reader of a pipe would wait for one who writes; a link leads elsewhere.
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        if (
            not stat.S_ISREG(found.st_mode)
            or not found.st_mode & stat.S_IWUSR  # somebody has protected it
            or found.st_uid != os.geteuid()
            or found.st_nlink != 1
            or found.st_size != size_bytes
            or found.st_blocks * 512 < size_bytes
        ):
            return False
        # Whoever opens it in this very moment has us told, by a signal that would end us (SIGIO)
        # if it were not another one, which is ignored; he waits until the lease is given back.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGWINCH)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:  # somebody has it open, or nobody can tell here
        return False
    finally:
        os.close(fd)
    return True


def _file_system(path: Path) -> str:
    """The type of the file system that `path` lies on; an empty string if it cannot be told."""
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
