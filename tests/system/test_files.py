"""The lock of a file: one process at a time, released when its descriptor is closed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.system.files import FileLocked, lock_file

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
