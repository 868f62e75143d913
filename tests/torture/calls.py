"""Records the file-system calls below one folder, of all processes, and makes some of them fail.

with preloaded(root) as env:                    # for a child: calls.c is compiled and loaded
    subprocess.run([...], env=env)

calls = Calls.attached()                        # in that child
calls.record(); ...; done = calls.stop()        # what all its processes have done below `root`
calls.fail(Plan(k=7, mode=Mode.ONCE, error=errno.EIO)); ...; calls.stop()
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import enum
import errno
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

CHANGE, READ, CLOSE = 1, 2, 4

_SOURCE = Path(__file__).with_name("calls.c")
_CONTROL = "TORTURE_CONTROL"
_HEAD = struct.Struct("<6I5Q16s512s")  # struct control, up to its lock
_RECORD_AT = 888
_ENTRY = struct.Struct("<IIIiqQqQQIIIII16s4x")
_CAPACITY_BYTES = 1 << 30  # sparse


class Mode(enum.IntEnum):
    """How a call fails."""

    NEVER = 0
    ONCE = 1
    KIND_FOR_GOOD = 2  # and every later call of the same kind
    ALL_FOR_GOOD = 3  # and every later call
    DONE_BUT_ERROR = 4  # it takes effect, and reports an error
    SHORT = 5  # a read or write of a part


@dataclasses.dataclass(frozen=True)
class Plan:
    """Call number `k` of the classes fails with `error`."""

    k: int
    mode: Mode
    error: int
    classes: int = CHANGE

    def __str__(self) -> str:
        return f"call {self.k} fails: {errno.errorcode[self.error]}, {self.mode.name.lower()}"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call. `path` is that of its file or folder when it was made; `other` the second name of a
    rename. `number` counts the calls that may fail; `mode` is how this one has failed.
    """

    kind: str
    path: str
    other: str
    pid: int
    ok: bool
    error: int
    inode: int
    offset: int
    size: int
    flags: int
    number: int
    mode: Mode
    data: bytes

    def __str__(self) -> str:
        names = " -> ".join(os.path.basename(p) for p in (self.path, self.other) if p)
        return f"{self.kind} {names}"


class Calls:
    """The calls of this process and its children. Made by `attached`."""

    def __init__(self, control: str) -> None:
        with open(control, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._library = ctypes.CDLL(None)

    @classmethod
    def attached(cls) -> Calls:
        """In a process that `preloaded` has given its environment."""
        return cls(os.environ[_CONTROL])

    @property
    def root(self) -> Path:
        """The folder whose calls count."""
        return Path(_HEAD.unpack_from(self._memory)[12].rstrip(b"\0").decode())

    def record(self) -> None:
        """Begins to record, and to count the calls that may fail."""
        self._start(1, Mode.NEVER, 0, 0, CHANGE)

    def count(self, classes: int) -> None:
        """Like `record`, and counts these calls."""
        self._start(1, Mode.NEVER, 0, 0, classes)

    def fail(self, plan: Plan) -> None:
        """Makes a call fail; only those that fail are recorded."""
        self._start(0, plan.mode, plan.error, plan.k, plan.classes)

    def stop(self) -> list[Call]:
        """Ends what `record` or `fail` has begun; returns the calls."""
        struct.pack_into("<I", self._memory, 0, 0)
        head = _HEAD.unpack_from(self._memory)
        if head[5]:
            raise RuntimeError("the record of the calls is full")
        return list(self._entries(head[9]))

    def note(self, text: str) -> None:
        """Puts a note among the calls."""
        self._library.torture_note(text.encode())

    def _start(self, records: int, mode: Mode, error: int, k: int, classes: int) -> None:
        memory = self._memory
        struct.pack_into("<5I", memory, 4, records, mode, error, classes, 0)
        struct.pack_into("<4Q", memory, 24, 0, k, 0, 0)
        struct.pack_into("<I", memory, 0, 1)  # last

    def _entries(self, used: int) -> Iterator[Call]:
        at, end = _RECORD_AT, _RECORD_AT + used
        while at < end:
            (total, pid, _tid, error, result, inode, offset, size, number, flags, mode, n, m, d,
             kind) = _ENTRY.unpack_from(self._memory, at)  # fmt: skip
            begin = at + _ENTRY.size
            path = self._memory[begin : begin + n].decode()
            other = self._memory[begin + n : begin + n + m].decode()
            data = self._memory[begin + n + m : begin + n + m + d]
            name = kind.rstrip(b"\0").decode()
            yield Call(
                name, path, other, pid, result >= 0, error, inode, offset, size, flags, number,
                Mode(mode), data,
            )  # fmt: skip
            at += total


def why_not() -> str:
    """Why calls cannot be recorded here; empty if they can."""
    return "" if shutil.which("cc") else "there is no C compiler (cc)"


@contextlib.contextmanager
def preloaded(root: Path) -> Iterator[dict[str, str]]:
    """The environment of a process whose calls below `root` are to be recorded."""
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        library, control = Path(folder) / "calls.so", Path(folder) / "control"
        subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", "-w", "-o", library, _SOURCE, "-ldl", "-lpthread"],
            check=True,
        )
        with control.open("wb") as file:
            file.truncate(_RECORD_AT + _CAPACITY_BYTES)
            head = (0, 0, 0, 0, CHANGE, 0, 0, 0, 0, 0, _CAPACITY_BYTES, b"", os.fsencode(root))
            file.write(_HEAD.pack(*head))
        before = os.environ.get("LD_PRELOAD", "")
        yield {
            **os.environ,
            "LD_PRELOAD": f"{library} {before}".strip(),
            _CONTROL: str(control),
        }


def initialize() -> None:
    """In the first process of `preloaded`, before it starts others."""
    ctypes.CDLL(None).torture_init()
