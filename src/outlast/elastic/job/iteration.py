"""How far the body of the training loop is with the present step: a part of the job's state.

    STEPPED   `job.step()` has counted the step
    ENDED     the functions of `job.after_steps` that are due have ended; `job.step()` returns
    BACK      the loop over `job.batches` has come back for the next batch: the body has ended
    OVER      the loop over `job.epochs` has come back, after a loop over batches that was left

Each *phase* is a point at which the state of the job is whole. In a state that is restored at
STEPPED, the functions run again. Before BACK, the rest of the body is not repeated: the log names
it, if it has an effect beyond local variables (a call, an assignment to an attribute or an item).

`rest_after` finds that in the bytecode. From a call on, the instructions are followed up to the end
of the innermost loop around it. Without a loop in the function, those of its caller follow.
Instructions of an earlier line than that of the call belong to the loop's condition, or to the end
of a `with` block around it.
"""

from __future__ import annotations

import dis
import os
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

from outlast.elastic.job.parts import Part

STEPPED, ENDED, BACK, OVER = range(4)
"""The phases of a step, in their order."""

_AT = "at"  # part of the checkpoint's format
_FRAMES = 16
_EFFECTS = ("CALL", "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "DELETE_", "YIELD", "IMPORT_NAME")
_ENDS = ("RETURN_", "RERAISE", "RAISE_VARARGS")
_JUMPS = {*dis.hasjrel, *dis.hasjabs}


class Iteration(Part):
    """The last phase of the present step that this rank has reached; `place` is as in `Rest`."""

    in_place = False

    def __init__(self) -> None:
        self.phase, self.place = BACK, ""

    @property
    def rest(self) -> str:
        """`place`, unless the rest of the body was run."""
        return self.place if self.phase < BACK else ""

    def save(self) -> dict[str, Any]:
        return {_AT: (self.phase, self.place)}

    def shared(self) -> dict[str, Any]:
        """Without the phase, which the choice of a live state says."""
        return {_AT: (STEPPED, self.place)}

    @staticmethod
    def at(phase: int, shared: Mapping[str, Any]) -> dict[str, Any]:
        """What `save` would give in that phase."""
        return {_AT: (phase, shared[_AT][1])}

    def load(self, state: Mapping[str, Any], steps: int) -> None:
        """Of a state that was saved before there were phases, nothing is known."""
        self.phase, self.place = state.get(_AT, (BACK, ""))


class Rest(NamedTuple):
    """What stands behind a call in the body of its loop."""

    place: str = ""  # of the call, such as "job.step() at train.py:33"; empty if nothing does
    loop: tuple[CodeType, int] | None = None  # where it comes back, if nothing is run before that


_RETURNS = Rest("returns")

_known: dict[tuple[CodeType, int], Rest] = {}


def rest_after(frame: FrameType | None, call: str) -> Rest:
    """What stands behind `call`, which is in progress in `frame`."""
    is_first = True
    for _ in range(_FRAMES):
        if frame is None or frame.f_globals.get("__name__", "").startswith("outlast."):
            break
        key = frame.f_code, frame.f_lasti
        if key not in _known:
            _known[key] = _rest(*key)
        found = _known[key]
        if found is not _RETURNS:
            place = f"{call} at {found.place}" if found.place else ""
            return Rest(place, found.loop if is_first else None)
        frame, is_first = frame.f_back, False
    return Rest()


def _rest(code: CodeType, at: int) -> Rest:
    """What stands behind the call at this offset; `_RETURNS` if it is in no loop of this code."""
    lines = {start: line for first, end, line in code.co_lines() for start in range(first, end, 2)}
    instructions = list(dis.get_instructions(code))
    numbers = {each.offset: number for number, each in enumerate(instructions)}
    jumps = {each.offset: each.argval for each in instructions if each.opcode in _JUMPS}
    heads = [to for where, to in jumps.items() if to <= at < where]
    last = max((where for where, to in jumps.items() if heads and to == max(heads)), default=None)
    line = lines.get(at) or 0
    number = sum(each.offset <= at for each in instructions)  # a call may have inline data
    if instructions[number - 1].opname == "PRECALL":  # Python 3.11
        number += 1
    left, seen, is_quiet = [number], set[int](), True
    while left:
        number = left.pop()
        each = instructions[number]
        if number in seen or (last is not None and each.offset > last):
            continue
        seen.add(number)
        is_earlier = (lines.get(each.offset) or line) < line
        if each.opname.startswith(_ENDS):
            continue
        if each.offset in jumps:
            if jumps[each.offset] > at:
                left.append(numbers[jumps[each.offset]])
            if is_earlier or (each.opname.startswith("JUMP_") and "_IF_" not in each.opname):
                continue
        elif each.opname.startswith(_EFFECTS):
            if not is_earlier:
                return Rest(f"{os.path.basename(code.co_filename)}:{line}")
            is_quiet = False
        elif each.opname.startswith("INPLACE_") or (
            each.opname == "BINARY_OP" and each.argrepr.endswith("=")
        ):
            is_quiet = False  # `total += loss` may write to a tensor of `states`
        left.append(number + 1)
    if last is None:
        return _RETURNS
    return Rest(loop=(code, max(heads)) if is_quiet else None)
