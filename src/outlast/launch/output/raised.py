"""The exception at the end of a worker's output: its line and its place in the user's code."""

from __future__ import annotations

import dataclasses
import re

from outlast.system.user_frames import place_in_user_code

_RANK = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""What torch puts before each line of a traceback."""
_START = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(.+)", line (\d+)(?:, in (.+))?$')
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Abort)\b")
"""The line of an exception that has no traceback: a script that cannot be parsed, C++ code."""
_TYPE = re.compile(r"(initialize: |health_check: |)(?:\w+\.)*([A-Za-z_]\w*)(?=: |$)")
"""What stands before the message of an exception: the hook that raised it, and its type."""
_CHAINED = ("During handling of the above exc", "The above exception was the direct cause")
"""What Python writes, between two empty lines, above a traceback with a context or a cause."""
_BY_PDB = ("BdbQuit", "bdb.BdbQuit")
_DEBUGGING = (
    "breakpoint() and pdb need a terminal, and the workers of a job have none: debug a single "
    "process with `python SCRIPT`"
)


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception: `KeyError: 'x'`, and `train.py:16`; the place is empty if it is not known."""

    error: str
    place: str = ""

    def told(self, of: str = "") -> str:
        """`KeyError at train.py:16 (rank 1): 'x'`, with ` (rank 1)` as `of`. The message is last,
        because it may be long, or several sentences.
        """
        found = _TYPE.match(self.error)
        kind, message = self.error, ""  # of a rank that hangs, for example
        if found is not None:
            kind, message = f"{found[1]}{found[2]}", self.error[found.end() :]
        return f"{kind}{f' at {self.place}' if self.place else ''}{of}{message}"

    def repeats(self, other: Raised) -> bool:
        """Whether it is the other error again, or the message of another rank about it."""
        return self == other or self.error.endswith(f" {other.error.rpartition('.errors.')[2]}")

    @property
    def advice(self) -> str:
        """What the user can do, if that is not obvious."""
        return _DEBUGGING if self.error.startswith(_BY_PDB) else ""


def raised(output: str) -> Raised | None:
    """The exception that ended a worker with this output; `None` if there is none in it."""
    lines = without_ranks(output).splitlines()
    last = from_last_traceback(lines)
    start = max((n for n, line in enumerate(last) if line == _START), default=-1)
    if start < 0:
        errors = [line for line in lines if _ERROR.match(line)]
        return Raised(errors[-1], _place(lines)) if errors else None
    after = last[start + 1 :]
    error = next((line for line in after if line and not line.startswith(" ")), "")
    return Raised(error, _place(after)) if error else None


def without_ranks(output: str) -> str:
    """The output without torch's prefixes."""
    return _RANK.sub("", output)


def from_last_traceback(lines: list[str]) -> list[str]:
    """The lines from the last traceback on, with the tracebacks that it is chained to."""
    starts = [i for i, line in enumerate(lines) if line.startswith(_START)]
    while len(starts) > 1 and lines[starts[-1] - 2].startswith(_CHAINED):
        starts.pop()
    return lines[starts[-1] :] if starts else lines


def _place(lines: list[str]) -> str:
    """The innermost line of the user's code among the frames."""
    found = [frame for line in lines if (frame := _FRAME.fullmatch(line)) is not None]
    frames = [(frame[1], int(frame[2]), frame[3] or "") for frame in reversed(found)]
    return place_in_user_code(frames).partition(" in ")[0]
