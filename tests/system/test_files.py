"""The lock of a file: one process at a time, released when its descriptor is closed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outlast.system import files
from outlast.system.files import FileLocked, lock_file
from outlast.system.processes import is_dying

HOLD = """
import sys
from outlast.system.files import lock_file
lock_file(sys.argv[1], "the holder")
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_locked_file_names_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(FileLocked, match="the holder"):
            lock_file(path, "another")
    os.close(lock_file(path, "another"))  # the holder has ended
    assert path.read_text() == "another"


HOLD_LONGER = """
import ctypes, os, sys, threading
from outlast.system.files import lock_file
lock_file(sys.argv[1], "the holder")
def wait():
    print("locked", flush=True)
    sys.stdin.read()
threading.Thread(target=wait).start()
# Ends the main thread alone: the process looks dead, and its other thread still has the files open.
ctypes.CDLL(None).syscall({exit}, 0)
"""


def test_the_lock_of_a_dying_process_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    number = 60 if os.uname().machine == "x86_64" else 93
    command = [sys.executable, "-c", HOLD_LONGER.format(exit=number), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == b"locked\n"
        while not is_dying(holder.pid):
            time.sleep(0.01)
        waited = []

        def wait(_: float) -> None:
            waited.append(is_dying(holder.pid))
            holder.kill()

        monkeypatch.setattr(files, "_pause", wait)
        os.close(lock_file(path, "another"))
        assert waited
        assert all(waited)


def test_a_dying_process_whose_end_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        monkeypatch.setattr(files, "is_dying", lambda _: True)
        monkeypatch.setattr(files, "_DYING_S", 0.05)
        with pytest.raises(FileLocked, match="the holder"):
            lock_file(path, "another")
