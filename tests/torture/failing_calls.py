"""Failing calls: each file-system call of a save, or of a restore, fails once or for good.

A call fails with each error that its kind may have; a call may also take effect and then report an
error, and a read or write may be short. After a failed save the checkpoint before it is found, and
after a save that was reported committed that one; no restore steps back because a read has failed.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import tempfile
import time
import traceback
from pathlib import Path
from random import Random
from typing import Protocol

from .calls import CHANGE, CLOSE, READ, Call, Calls, Mode, Plan
from .crash_states import Result

_NAMES = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ESTALE)
ERRORS: dict[str, tuple[int, ...]] = {
    "open": (*_NAMES, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR),
    "write": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EINTR, errno.ESTALE),
    "pwrite": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EINTR, errno.EAGAIN),
    "truncate": (errno.EIO, errno.ENOSPC, errno.EINTR),
    "fallocate": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.EOPNOTSUPP),
    "fsync": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR, errno.ESTALE),
    "rename": (*_NAMES, errno.EBUSY, errno.ENOMEM),
    "link": _NAMES,
    "mkdir": (*_NAMES, errno.EMLINK, errno.ENOMEM),
    "unlink": (errno.EIO, errno.EROFS, errno.EACCES, errno.EBUSY, errno.ESTALE),
    "rmdir": (errno.EIO, errno.EROFS, errno.EACCES, errno.EBUSY, errno.ESTALE),
    "close": (errno.EIO, errno.EINTR, errno.ENOSPC, errno.EDQUOT),
    "read": (errno.EIO, errno.ESTALE, errno.EINTR, errno.ENOMEM),
    "pread": (errno.EIO, errno.ESTALE, errno.EINTR, errno.ENOMEM, errno.EAGAIN),
    "stat": (errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOMEM),
    "fstat": (errno.EIO, errno.ESTALE, errno.ENOMEM),
    "opendir": (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    "readdir": (errno.EIO, errno.ESTALE),
}
_SHORT = ("write", "pwrite", "read", "pread")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the program was told: the number of the last save that it believes committed, of the
    last that may be, and the error, if there was one.
    """

    least: int
    most: int
    error: Exception | None = None


class Subject(Protocol):
    """A program that saves or restores, and the restore that must work afterwards."""

    name: str
    classes: int  # of the calls that fail

    def prepare(self, folder: Path, random: Random) -> None:
        """Fills the folder."""

    def run(self, folder: Path) -> Outcome:
        """The program, of which one call fails. Raises what it must not raise."""

    def after(self, folder: Path, saves_too: bool) -> int:
        """Restores when no call fails any more, and returns the number of the save; with
        `saves_too` it also saves, and restores that.
        """


def plans(counted: list[Call]) -> list[Plan]:
    """All failures of the calls of a run."""
    found = []
    classes = max((each.number for each in counted), default=0) and _classes(counted)
    for call in counted:
        if not call.number or call.kind not in ERRORS:
            continue
        for error in ERRORS[call.kind]:
            found.append(Plan(call.number, Mode.ONCE, error, classes))
            if error != errno.EINTR:  # Python and libraries try again, as they should
                found.append(Plan(call.number, Mode.KIND_FOR_GOOD, error, classes))
            if error in (errno.EIO, errno.ESTALE):
                found.append(Plan(call.number, Mode.ALL_FOR_GOOD, error, classes))
            if error in (errno.EIO, errno.EINTR, errno.ESTALE) and call.kind not in _SHORT:
                found.append(Plan(call.number, Mode.DONE_BUT_ERROR, error, classes))
        if call.kind in _SHORT:
            found.append(Plan(call.number, Mode.SHORT, errno.EIO, classes))
    return found


def _classes(counted: list[Call]) -> int:
    kinds = {call.kind for call in counted if call.number}
    reads = {"read", "pread", "stat", "fstat", "opendir", "readdir"}
    found = (READ if kinds & reads else 0) | (CLOSE if "close" in kinds else 0)
    return found | (CHANGE if kinds - reads - {"close"} else 0)


def try_failing_calls(
    subject: Subject, calls: Calls, seed: int, *, until: float, most: int | None = None
) -> Result:
    """Runs `subject` again and again until `until` (monotonic), another call failing each time, in
    an order given by the seed.

    Args:
        most: how many failures to try.
    """
    chance = Random(seed)
    result = Result()
    work = Path(tempfile.mkdtemp(dir=calls.root))
    try:
        subject.prepare(work / "template", chance)
        shutil.copytree(work / "template", work / "counted")
        calls.count(subject.classes)
        try:
            subject.run(work / "counted")
        finally:
            counted = calls.stop()
        todo = plans(counted)
        chance.shuffle(todo)
        for number, plan in enumerate(todo[:most]):
            folder = work / f"trial{number}"  # a session that could not end keeps its name
            shutil.copytree(work / "template", folder)
            wrong, failed = _try(subject, calls, folder, plan, number % 8 == 0)
            for left in work.glob("trial*"):
                shutil.rmtree(left, ignore_errors=True)
            result.tried += 1
            if wrong:
                what = ", ".join(map(str, failed[:2])) or "no call"
                result.violations.append(f"{plan} ({what}): {wrong}")
            if time.monotonic() > until:
                break
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return result


def _try(
    subject: Subject, calls: Calls, folder: Path, plan: Plan, saves_too: bool
) -> tuple[str, list[Call]]:
    """What is wrong, and the calls that have failed."""
    calls.fail(plan)
    outcome, wrong = None, ""
    try:
        outcome = subject.run(folder)
    except Exception as e:  # noqa: BLE001 - each is a violation
        wrong = f"raised {_text(e)}"
    finally:
        failed = [call for call in calls.stop() if call.mode]
    if outcome is None:
        return wrong, failed
    try:
        # Under another name, it is that of no checkpointer of this process.
        renamed = folder.rename(folder.with_name(f"{folder.name}-after"))
        found = subject.after(renamed, saves_too)
    except Exception as e:  # noqa: BLE001
        return f"told {outcome.error or 'committed'!r}, and afterwards {_text(e)}", failed
    if not outcome.least <= found <= outcome.most:
        told = _text(outcome.error) if outcome.error else "no error"
        return (f"found save {found}, not {outcome.least} to {outcome.most}, after {told}"), failed
    if outcome.error is not None and failed and plan.mode != Mode.SHORT:
        return _unnamed(outcome.error, plan, failed), failed
    return "", failed


def _unnamed(error: Exception, plan: Plan, failed: list[Call]) -> str:
    """What the text of the error lacks."""
    text = str(error)
    if os.strerror(plan.error) not in text and errno.errorcode[plan.error] not in text:
        return f"the error does not say {os.strerror(plan.error)!r}: {_text(error)}"
    return ""


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()[:700]
