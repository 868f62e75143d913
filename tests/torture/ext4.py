"""A real ext4 on a loop device, whose journal is abandoned in the middle of a save.

`EXT4_IOC_SHUTDOWN` without a flush of the log is what a power loss is to the file system: what has
not reached the device is lost. Then the device is mounted again, its journal is replayed, and the
checkpoint that was committed must be found. This shows what the model of `disk` assumes, for one
file system; the model reaches states that ext4 does not.

Needs root, and a kernel with loop devices: `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from outlast.async_checkpoint import Checkpointer
from outlast.errors import CheckpointError

from .calls import Calls
from .crash_states import Result
from .subjects.checkpointer import NET, check, state_of

_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2
_NEW_MOUNTS, _IMAGE_BYTES, _ELEMENTS = 0x20000, 96 << 20, 40_000


def why_not() -> str:
    """Why no image can be mounted here; empty if one can."""
    if os.geteuid() != 0:
        return "only root may mount an image"
    missing = [each for each in ("mount", "umount", "mkfs.ext4") if not shutil.which(each)]
    if missing:
        return f"there is no {' and no '.join(missing)}"
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        image, at = _image(Path(folder))
        done = subprocess.run(["mount", "-o", "loop", image, at], capture_output=True, text=True)
        if done.returncode == 0:
            subprocess.run(["umount", at], check=True)
            return ""
        return f"an image cannot be mounted: {done.stderr.strip()}"


def _image(folder: Path) -> tuple[Path, Path]:
    image, at = folder / "image", folder / "mounted"
    with image.open("wb") as file:
        file.truncate(_IMAGE_BYTES)
    at.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    return image, at


@contextlib.contextmanager
def _mounted(image: Path, at: Path) -> Iterator[None]:
    subprocess.run(["mount", "-o", "loop", image, at], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", at], check=True)


def try_ext4(calls: Calls, seed: int, until: float, most: int | None) -> Result:
    """Abandons the journal again and again until `until` (monotonic), at moments from the seed."""
    # The mounts are this process's own: they end with it, however it ends.
    if ctypes.CDLL(None).unshare(_NEW_MOUNTS) != 0:
        raise OSError("the mounts cannot be separated")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    chance, result = Random(seed), Result()
    image, at = _image(calls.root)
    found = 0
    while time.monotonic() < until and result.tried != most:
        folder = at / "checkpoints"
        with _mounted(image, at):
            least, begun = _save_until_shutdown(folder, found, chance)
        with _mounted(image, at):
            try:
                with Checkpointer(folder) as checkpointer:
                    state = {"model": {}, "save": 0, "note": ""}
                    step = checkpointer.restore(state)
                found = 0 if step is None else check(state, _ELEMENTS)
                wrong = "" if least <= found <= begun else f"restored save {found}"
            except Exception as e:  # noqa: BLE001 - each is a violation
                found, wrong = begun, f"{type(e).__name__}: {e}"
        result.tried += 1
        if wrong:
            result.violations.append(f"{wrong}; save {least} was committed, {begun} begun")
    return result


def _save_until_shutdown(folder: Path, last: int, chance: Random) -> tuple[int, int]:
    """Saves until the file system is shut down, at a moment from `chance`. Returns the last save
    that was committed before that moment, and the last that had begun.
    """
    progress = {"committed": last, "begun": last}
    keep, replaced = chance.choice((1, 2)), chance.random() < 0.2
    saved = threading.Semaphore(0)

    def save() -> None:
        number = last
        with contextlib.suppress(CheckpointError, OSError):
            checkpointer = Checkpointer(folder, keep=keep, threads=chance.choice((1, 2)))
            try:
                while True:
                    number += 1
                    progress["begun"] = number
                    step = max(number - 1, 1) if replaced and number % 2 else number
                    checkpointer.save(step, state_of(number, _ELEMENTS)).result(NET)
                    progress["committed"] = number
                    saved.release()
            finally:
                saved.release()
                checkpointer.abort()
                checkpointer.session.close(0.0)

    descriptor = os.open(folder.parent, os.O_RDONLY)
    thread = threading.Thread(target=save)
    thread.start()
    try:
        for _ in range(chance.randrange(3)):
            saved.acquire()
        time.sleep(chance.random() * 0.15)  # a moment within the next save
        committed = progress["committed"]
        fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(descriptor)
        thread.join()
    return committed, progress["begun"]
