"""A replacement that is faster than the writer of the dead process waits for its snapshots."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.async_checkpoint.writer import handover
from outlast.system.files import private_folder
from outlast.system.sockets import unix_address

WRITER = """
import os, sys
from pathlib import Path
from outlast.async_checkpoint.writer.handover import (
    Announcement, StoredSnapshot, hand_over
)
from outlast.system.shared_memory import SharedMemory
path, main = Path(sys.argv[1]), int(sys.argv[2])
announcement = Announcement(main)
announcement.place(path)
print("placed", flush=True)
what = sys.stdin.readline()
if what != "end\\n":
    memory = SharedMemory(4)
    memory.view[:4] = b"kept"
    snapshots = [StoredSnapshot({"step": 1, "layout": []}, b"values", SharedMemory(4))]
    lost = SharedMemory(4)
    os.ftruncate(lost.descriptor, 0)
    snapshots.append(StoredSnapshot({"step": 3, "layout": []}, b"values of the lost", lost))
    launcher = os.pidfd_open(os.getppid())
    if what == "listen\\n":
        hand_over(announcement, snapshots, {}, 60.0, launcher)
    else:
        hand_over(announcement, [], {"own": memory}, 60.0, launcher)
announcement.withdraw()
"""


@pytest.fixture
def dead() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def writer(path: Path, main: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(main)]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "placed\n"
    return process


@pytest.fixture
def path(tmp_path: Path) -> Path:
    temporary = tmp_path / ("long" * 30)  # more than fits into the address of a socket
    temporary.mkdir()
    return private_folder(temporary / "private") / "0.sock"


@pytest.mark.parametrize("does", ["listen", "end", "give kept memory"])
def test_a_replacement_waits_for_the_writer_of_a_dead_process(
    path: Path,
    dead: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    does: str,
) -> None:
    """Memory that is not there any more is not taken over."""
    asked = handover.is_announced
    told = []
    with writer(path, dead) as process:

        def is_announced(socket_path: Path) -> bool:
            found = asked(socket_path)
            if not told:  # the first attempt to connect has failed
                told.append(found)
                assert process.stdin is not None
                process.stdin.write(f"{does}\n")
                process.stdin.flush()
            return found

        monkeypatch.setattr(handover, "is_announced", is_announced)
        found, kept = handover.take_over(path)
        for each in found:
            each.memory.close()
        content = b""
        for name, memory in kept.items():
            content += name.encode() + b" " + bytes(memory.view[:4])
            memory.close()
    assert told == [True]
    assert [each.values for each in found] == ([b"values"] if does == "listen" else [])
    lost = "the memory with the snapshot of step 3 is lost"
    assert (lost in caplog.text) == (does == "listen")
    assert content == (b"own kept" if does == "give kept memory" else b"")
    assert os.listdir(path.parent) == []


def test_a_process_does_not_wait_for_the_writer_of_a_living_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart in place, of its own: not even its status is read."""
    monkeypatch.setattr(handover, "is_dying", lambda pid: pytest.fail(f"asked for {pid}"))
    with writer(path, os.getpid()) as process:
        assert handover.take_over(path) == ([], {})
        process.communicate("end\n")


def test_a_killed_writer_announces_nothing(path: Path, dead: int) -> None:
    with writer(path, dead) as process:
        process.kill()
    assert handover.take_over(path) == ([], {})


def test_the_socket_of_a_writer_that_was_killed_is_removed(path: Path, dead: int) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        with unix_address(path) as address:
            left.bind(address)  # and does not listen
        with writer(path, dead) as process:
            assert handover._connect(path) is None
            assert path.exists()  # the writer is about to listen
            process.kill()
        assert handover.take_over(path) == ([], {})
    assert not path.exists()
