"""The figures of a job from its log, and the table of all jobs."""

from __future__ import annotations

from typing import Any

from benchmarks.lib.sheets import Sheet, median, quantile
from benchmarks.recovery.contenders import RANKS
from benchmarks.recovery.job import EVERY, Outcome

__all__ = ["KINDS", "figures", "sheets"]

KINDS = ("exception", "sigkill")
_ERROR_LINES = 3
REACHED = 0.5
"""Of the steps that a job without faults and saves makes in its time: how soon are they made?"""


def figures(outcome: Outcome, planned: int, duration: float, plain: float) -> dict[str, Any]:
    """What became of each of the planned faults, and goodput: how much of the time went into steps
    that count, each once, as far as each rank has made them.
    """
    log = sorted(outcome.log, key=lambda line: float(line["at"]))
    steps = [line for line in log if line["event"] == "step"]
    faults = [_recovery(line, steps) for line in log if line["event"] == "fault"]
    until = steps[0]["at"] + duration if steps else 0.0
    counted = {(line["rank"], line["step"]) for line in steps if line["at"] <= until}
    goal = int(REACHED * duration / plain)
    reached = next((e["at"] for e in steps if e["step"] >= goal and e["at"] <= until), None)
    return {
        "faults": faults,
        "missed": planned - len(faults),
        "steps": max((step for _, step in counted), default=0),
        "goodput": len(counted) / RANKS * plain / duration,
        "goal": goal,
        "reached": None if reached is None else reached - steps[0]["at"],
        "error": outcome.error,
    }


def _recovery(fault: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds from a fault to the first useful step, and to the first of the rank that failed."""
    at, rank = fault["at"], fault["rank"]
    before = max((e["step"] for e in steps if e["at"] <= at), default=0)
    useful = next((e["at"] for e in steps if e["at"] > at and e["step"] > before), None)
    again = next((e for e in steps if e["at"] > at and e["rank"] == rank), None)
    return {
        "kind": fault["kind"],
        "useful": None if useful is None else useful - at,
        "again": None if again is None else again["at"] - at,
        "redone": None if again is None else max(0, before + 1 - again["step"]),
    }


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The tables of the results."""
    intervals = data["intervals"]
    rows = [_row(name, found, intervals) for name, found in data["systems"].items()]
    found = [
        Sheet(
            f"From a fault to the first useful step, and goodput; {RANKS} ranks, gloo",
            (
                "system",
                "faults (missed)",
                "exception: useful step, s",
                "failed rank steps, s",
                "steps redone",
                "SIGKILL: useful step, s",
                "failed rank steps, s",
                "steps redone",
                *(f"{what}, a fault every {n} s" for n in intervals for what in _OF_A_JOB),
            ),
            rows,
            _note(data),
        )
    ]
    failures = [
        (f"{name}, a fault every {interval} s", _short(each["error"]))
        for name, by_interval in data["systems"].items()
        if "missing" not in by_interval
        for interval, each in by_interval.items()
        if each["error"]
    ]
    if failures:
        found.append(Sheet("What failed", ("job", "error"), failures))
    return found


def _row(name: str, found: dict[str, Any], intervals: list[str]) -> tuple[str, ...]:
    if "missing" in found:
        return (name, f"{found['missing']} is not installed", *["-"] * (6 + 2 * len(intervals)))
    every = [fault for interval in intervals for fault in found[interval].get("faults", [])]
    missed = sum(found[interval].get("missed", 0) for interval in intervals)
    row = [name, f"{len(every)} ({missed})"]
    for kind in KINDS:
        those = [fault for fault in every if fault["kind"] == kind]
        row += [_spread([fault[what] for fault in those]) for what in ("useful", "again")]
        redone = median([fault["redone"] for fault in those if fault["redone"] is not None])
        row.append("-" if redone is None else f"{redone:g}")
    return (*row, *(text for interval in intervals for text in _of_a_job(found[interval])))


_OF_A_JOB = ("goodput", "s to half of the steps")


def _of_a_job(found: dict[str, Any]) -> tuple[str, str]:
    goodput, reached = f"{found['goodput']:.1%}", found["reached"]
    share = f"{goodput}, failed" if found["error"] else goodput
    return share, "not reached" if reached is None else f"{reached:.1f}"


def _spread(values: list[float | None]) -> str:
    """Median and worst."""
    known = [value for value in values if value is not None]
    if not known:
        return "never" if values else "-"
    text = f"{median(known):.2f} ({quantile(known, 1.0):.2f})"
    missing = len(values) - len(known)
    return f"{text}, {missing} never" if missing else text


def _note(data: dict[str, Any]) -> str:
    packages = data.get("packages", ["not recorded"])
    lengths = " and ".join(f"{seconds:g}" for seconds in data["durations"])
    return (
        f"Medians, with the worst in parentheses, of the faults at both rates. The jobs ran for "
        f"{lengths} s from their first step. A step without faults and saves takes "
        f"{data['plain_step'] * 1000:.1f} ms under torchrun; goodput is the number of steps of "
        "both ranks, each counted once, times that, by the time. Half of the steps: of those "
        "that fit into that time without faults and saves; the best possible is half of the time. "
        "Faults every 36 s are as far apart in steps as on 16,384 accelerators (a failure every "
        "1.8 h, arXiv:2410.21680, 6.2 s a step, arXiv:2407.21783). Useful step: beyond all before "
        f"the fault. Missed: due while that rank was down. Each system saves every {EVERY} steps, "
        "except torchft, which saves nothing, and goes on with half of the batch while a rank is "
        "down. nvidia-resiliency-ext saves with torch.save: its own asynchronous save needs CUDA. "
        "Its newest version needs Python 3.12: `make bench NVRX=0.7.0 PYTHON=python3.12`. torchft "
        "is with a hook of ours, since its survivors end with its own. torch-checkpointing is not "
        f"here: it saves and loads, and restarts nothing. Versions: {', '.join(packages)}."
    )


def _short(error: str) -> str:
    """The first line and the last ones of an error, in one line."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    kept = lines[:1] + lines[1:][-_ERROR_LINES:]
    return " / ".join(kept).replace("|", "\\|")[:600]
