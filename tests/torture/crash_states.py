"""Crash states: what a power loss during a program may leave on the disk, each restored.

A *subject* is a program that saves, and the restore that must find what it has saved. Its saves
are numbered from 1, in the order in which they must be found; it notes `begun V` before save V, and
`committed V` once it was told so. After a power loss at any moment, a restore must return,
complete, the newest save that was committed by then, or a later one that had begun; and never
raise.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from random import Random
from typing import Protocol

from .calls import Call, Calls
from .disk import Disk, Tree, build, digest

STATES_OF_A_POINT = 24
"""How many states are tried between two calls; all of them where there are fewer."""


class Subject(Protocol):
    """See the module."""

    name: str

    def prepare(self, folder: Path, random: Random) -> int:
        """Fills the folder with what is there before; returns the number of the last save."""

    def run(self, folder: Path, calls: Calls) -> None:
        """The program whose calls are recorded. `random` of `prepare` may have planned it."""

    def restorer(self) -> AbstractContextManager[Callable[[Path, bool], int]]:
        """A function that restores from a folder: it returns the number of the save that it found,
        0 if there is none, and raises if that is incomplete or mixed with another. If its second
        argument is true it also saves, and restores that.
        """


@dataclasses.dataclass
class Result:
    """What a trial has found."""

    tried: int = 0
    violations: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _Point:
    """A moment: the calls before it, and what a restore may find."""

    number: int
    call: Call
    least: int
    most: int


def try_crash_states(
    subject: Subject, calls: Calls, seed: int, *, until: float, most: int | None = None
) -> Result:
    """Records one run of `subject`, and restores states of each moment until `until` (monotonic).

    Args:
        most: how many states to try.
    """
    plan = Random(seed)
    work = Path(tempfile.mkdtemp(dir=calls.root))
    try:
        before = subject.prepare(work / "saved", plan)
        disk = Disk(work)
        calls.record()
        try:
            subject.run(work / "saved", calls)
        finally:
            recorded = calls.stop()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    result = Result()
    seen: dict[bytes, tuple[int, int]] = {}
    shared_memory = tempfile.mkdtemp(prefix="torture-", dir="/dev/shm")
    try:
        with subject.restorer() as restore:
            for point, state in _states(disk, recorded, before, plan):
                # An equal state that had to hold more has been tried.
                key, asked = digest(state), (point.least, point.most)
                if key in seen and seen[key][0] >= asked[0] and seen[key][1] <= asked[1]:
                    continue
                seen[key] = asked
                folder = Path(shared_memory) / "state"
                build(state, folder)
                wrong = _try(restore, folder / "saved", point, plan)
                shutil.rmtree(folder, ignore_errors=True)
                result.tried += 1
                if wrong:
                    result.violations.append(f"after call {point.number} ({point.call}): {wrong}")
                if time.monotonic() > until or result.tried == most:
                    break
    finally:
        shutil.rmtree(shared_memory, ignore_errors=True)
    return result


def _states(
    disk: Disk, recorded: list[Call], before: int, plan: Random
) -> Iterator[tuple[_Point, Tree]]:
    least = most = before
    for number, call in enumerate(recorded):
        if call.kind == "note":
            word, of = call.path.split()
            if word == "begun":
                most = max(most, int(of))
            else:
                least = max(least, int(of))
        elif not disk.apply(call):
            continue
        for state in disk.states(plan, STATES_OF_A_POINT):
            yield _Point(number, call, least, most), state


def _try(restore: Callable[[Path, bool], int], folder: Path, point: _Point, plan: Random) -> str:
    """What is wrong with the restore; empty if nothing is."""
    try:
        found = restore(folder, plan.random() < 0.02)
    except Exception as e:  # noqa: BLE001 - each is a violation
        text = "".join(traceback.format_exception_only(e)).strip()
        return f"{text[:600]}; save {point.least} was committed, {point.most} begun"
    if not point.least <= found <= point.most:
        return f"restored save {found}; save {point.least} was committed, {point.most} begun"
    return ""
