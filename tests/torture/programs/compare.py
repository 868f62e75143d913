"""Compares a run through faults with the undisturbed one."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import torch

from outlast.async_checkpoint import inspection

from .parts import Program
from .running import Run

_NOT_RUN = re.compile(r"was not run")
"""The line that says that the rest of a step is lost."""
_OF_A_STEP = "loss", "samples"
_COUNTS = re.compile(r"rank \d+ .*\d+ steps|step \d+ .*rank \d+", re.DOTALL)


def wrong_undisturbed(run: Run) -> list[str]:
    """Why a run without faults is not usable as the one to compare with."""
    found = run.wrong + damaged(run)
    if run.codes != [0]:
        found.append(f"without a fault it ends with {run.codes}")
    return found


def wrong_refusal(run: Run) -> list[str]:
    """What is wrong with the end of a job whose ranks do not make the same steps."""
    found = run.wrong + damaged(run)
    if 0 in run.codes:
        found.append("its ranks made different numbers of steps, and the exit code is 0")
    if not _COUNTS.search(run.output):
        found.append("no message names the ranks and their steps")
    return found


def differences(run: Run, reference: Run, program: Program) -> list[str]:
    """What is wrong with a run through faults."""
    found = run.wrong + damaged(run)
    if run.codes[-1:] != [0] or any(code != 143 for code in run.codes[:-1]):
        return [*found, f"it ends with {run.codes}: {_last_lines(run)}"]
    lost = lost_parts(run, program)
    expected, got = reference.values, run.values
    for key in sorted(expected.keys() | got.keys()):
        kind = key[0]
        if kind in lost:
            continue
        if key not in got and kind in _OF_A_STEP and any(k[:2] == key[:2] for k in got):
            continue  # a rank that has not completed the step has got the state of another one
        if key not in got:
            found.append(f"{_named(key)} is missing")
        elif key not in expected:
            found.append(f"{_named(key)} is not in the undisturbed run")
        elif kind == "end":
            found += _of_end(key[2], expected[key][-1], got[key][-1])
        elif extra := [each for each in got[key] if each not in expected[key]]:
            found.append(f"{_named(key)}: {extra[0]}, not {expected[key][0]}")
    if "rows" not in lost and (rows := reference.file("log.csv")) != run.file("log.csv"):
        found.append(_of_rows(rows or b"", run.file("log.csv") or b""))
    if "best" not in lost and _best(reference) != _best(run):
        found.append("another best model")
    return found


def lost_parts(run: Run, program: Program) -> set[str]:
    """What may differ, where the job has said that the rest of a step was not run: the rows written
    there; what an evaluation there has found, and, as it draws random numbers, all that follows.
    The samples never.
    """
    if not _NOT_RUN.search(run.output):
        return set()
    if program["evaluation"] == "rest":
        return {"evaluation", "loss", "epoch", "end", "rows", "best"}
    return {"rows"} if program["log"] == "each_step" else set()


def damaged(run: Run) -> list[str]:
    """Checkpoints that are visible, and not complete."""
    folder = run.folder / "checkpoints"
    if not folder.exists():
        return []
    with contextlib.closing(inspection.open_storage(str(folder))) as storage:
        return [
            f"the checkpoint {one.folder} is damaged: {one.wrong}"
            for one in inspection.survey(storage)
            if one.wrong
        ]


def _of_end(rank: int, expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    names = sorted(expected.keys() | got.keys())
    other = [name for name in names if expected.get(name) != got.get(name)]
    return [f"rank {rank} ends with another {', '.join(other)}"] if other else []


def _of_rows(expected: bytes, got: bytes) -> str:
    wanted, rows = expected.splitlines(), got.splitlines()
    for number, (a, b) in enumerate(zip(wanted, rows, strict=False), 1):
        if a != b:
            return f"row {number} of the log is {b!r}, not {a!r}"
    return f"the log has {len(rows)} rows, not {len(wanted)}"


def _best(run: Run) -> Any:
    path = run.folder / "best.pt"
    if not path.exists():
        return None
    found = torch.load(path, weights_only=True)
    return found["value"], {k: v.numpy().tobytes() for k, v in found["model"].items()}


def _named(key: tuple[str, str, int]) -> str:
    kind, name, rank = key
    return f"{kind} {name} of rank {rank}".replace("  ", " ")


def _last_lines(run: Run, count: int = 25) -> str:
    return "\n".join(run.output.splitlines()[-count:])
