"""A replacement that is faster than the writer of the dead process waits for its snapshots."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.async_checkpoint.writer import handover

WRITER = """
import os, sys
from pathlib import Path
from outlast.async_checkpoint.writer.handover import Announcement, HandedOver, hand_over
path, main = Path(sys.argv[1]), int(sys.argv[2])
announcement = Announcement(main)
announcement.place(path)
print("placed", flush=True)
if sys.stdin.readline() == "listen\\n":
    snapshot = HandedOver({"socket": str(path)}, b"values", os.memfd_create("buffer"))
    hand_over([snapshot], 60.0, os.pidfd_open(os.getppid()), announcement)
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
    return handover.private_folder(tmp_path / "private") / "0.sock"


@pytest.mark.parametrize("does", ["listen", "end"])
def test_a_replacement_waits_for_the_writer_of_a_dead_process(
    path: Path, dead: int, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
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
        found = handover.take_over(path)
        for each in found:
            os.close(each.descriptor)
    assert told == [True]
    assert [each.values for each in found] == ([b"values"] if does == "listen" else [])
    assert os.listdir(path.parent) == []


def test_a_process_does_not_wait_for_the_writer_of_a_living_one(path: Path) -> None:
    with writer(path, os.getpid()) as process:
        assert handover.take_over(path) == []
        process.communicate("end\n")


def test_a_killed_writer_announces_nothing(path: Path, dead: int) -> None:
    with writer(path, dead) as process:
        process.kill()
    assert handover.take_over(path) == []
