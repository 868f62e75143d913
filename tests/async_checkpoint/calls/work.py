"""Functions for background calls, and gates that synchronize them with a test.

A test and a background process meet at named pipes, so neither needs to sleep.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any


class Gate:
    """Two named pipes: the call announces its arrival, and waits for permission to continue."""

    def __init__(self, folder: Path, name: str = "gate") -> None:
        self.here = folder / f"{name}.here"
        self.go = folder / f"{name}.go"
        for path in (self.here, self.go):
            if not path.exists():
                os.mkfifo(path)

    def wait_in_call(self) -> None:
        """The call's side."""
        self.here.write_text(str(os.getpid()))
        self.go.read_bytes()

    def arrived(self) -> int:
        """The test's side: waits until the call is at the gate; returns its process id."""
        return int(self.here.read_text())

    def open(self) -> None:
        """The test's side: lets the call continue."""
        self.go.write_bytes(b"")


def part(gate: Gate | None) -> None:
    """A rank's part of a call; with a gate, it waits there."""
    if gate is not None:
        gate.wait_in_call()


def other_part() -> None:
    pass


class Unreadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return cannot_be_made, ()


def cannot_be_made() -> None:
    raise RuntimeError("not here")


def close_everything() -> None:
    """Closes descriptors as a starting daemon does, and keeps running."""
    os.closerange(3, 1000)
    signal.alarm(60)
    signal.pause()


def takes(argument: object) -> None:
    pass


def write(path: Path, text: str) -> None:
    path.write_text(text)


def append_pid(path: Path) -> None:
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")


def wait_then_write(gate: Gate, path: Path, values: list[str]) -> None:
    gate.wait_in_call()
    path.write_text(" ".join(values))


def end_by(how: str) -> None:
    """Ends in the named way."""
    if how == "exception":
        raise ValueError("the disk is full of ideas")
    if how == "exit":
        sys.exit(3)
    if how == "message":
        sys.exit("no more")
    if how == "os._exit":
        os._exit(0)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "interrupt":
        raise KeyboardInterrupt
    assert how == "exit 0"
    sys.exit(0)


CAUSES = {
    "exception": "ValueError: the disk is full of ideas",
    "exit": "it exited with code 3",
    "message": "it exited with code no more",
    "os._exit": "its process ended with exit code 0, in the middle of the call",
    "kill": "its process was killed by SIGKILL",
    "interrupt": "KeyboardInterrupt",
}
"""The error message for each way to end that is a failure."""


def facts(path: Path) -> None:
    """Writes the properties of the process."""
    found: dict[str, Any] = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "nice": os.nice(0),
        "inherited": signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL,
        "interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "threads": None,
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        found["threads"] = torch.get_num_threads()
    os.kill(os.getpid(), signal.SIGTERM)  # a scheduler sends it to all processes of a job
    path.write_text(json.dumps(found))


def total(tensor: Any, path: Path) -> None:
    path.write_text(str(tensor.sum().item()))
