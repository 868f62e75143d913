"""The cost of a fault, a step and a save in one table, each with its goal: what the hardware, or
the work that cannot be left out, would take in the same run.

`--beside PATH` measures the code of another checkout too, in turns with this one: the measurements
are those of this checkout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.checkpoint.many_tensors import LOADS
from benchmarks.checkpoint.saves import BESIDE
from benchmarks.lib.sheets import Sheet
from benchmarks.limits.measure import MEASUREMENTS

__all__ = ["run", "sheets"]

_HERE = Path(__file__).parents[2]
_QUICK = ("exception, 1 MiB, kept", "step, 10 tensors", "saves, 1 rank", "first save")
_PATIENCE_S = 3600.0

Found = dict[str, dict[str, float]]


def run(quick: bool, beside: Path | None = None) -> dict[str, Any]:
    """The figures of each measurement, with the code of each checkout."""
    checkouts = {"now": _HERE, **({} if beside is None else {"before": beside})}
    found: dict[str, Found] = {name: {} for name in checkouts}
    for number, measurement in enumerate(_QUICK if quick else MEASUREMENTS):
        for name in list(checkouts)[:: 1 if number % 2 else -1]:
            print(f"limits: {measurement}, {name}", flush=True)
            try:
                found[name][measurement] = _measure(measurement, checkouts[name], quick)
            except subprocess.CalledProcessError as e:
                if name == "now":
                    raise
                print(f"limits: the other code cannot be measured so: {e}", flush=True)
    return {"found": found}


def _measure(name: str, checkout: Path, quick: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.limits.measure", name]
    path = os.pathsep.join(str(each) for each in (checkout / "src", _HERE))
    result = subprocess.run(
        [*command, *(["--quick"] if quick else [])],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        timeout=_PATIENCE_S,
        check=True,
        text=True,
    )
    figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return figures


class _Row(NamedTuple):
    """A row: its figure and its goal, from the figures of all measurements; in `unit`."""

    what: str
    figure: Callable[[Found], float]
    goal: Callable[[Found], float]
    unit: str = "ms"
    is_least: bool = False


def _total(name: str, copies: float | None = None, more: float = 0.010) -> _Row:
    """To the end of the first useful step; the goal is re-entry and a step, and `more` seconds or
    so many copies of the state over a socket.
    """

    def goal(found: Found) -> float:
        each = found[name]
        rest = more if copies is None else copies * each["socket"]
        return 1e3 * (each["re-entry"] + each["step"] + rest)

    return _Row(f"to a useful step, {name}", lambda found: 1e3 * found[name]["total"], goal)


def _by_limit(name: str) -> _Row:
    """To the end of the first useful step, where the goal is what cannot be left out: the state is
    copied into memory that the replacement has not had before, and it makes its model.
    """

    def goal(found: Found) -> float:
        each = found[name]
        return 1e3 * (each["re-entry"] + each["model"] + each["step"] + each["neighbor"])

    figure: Callable[[Found], float] = lambda found: 1e3 * found[name]["total"]  # noqa: E731
    return _Row(f"the same, {name}, by a copy into new memory and the model", figure, goal)


def _without_job(name: str) -> _Row:
    """The limit of a job: two rounds of all ranks, and loads, by torch alone in its place."""
    return _Row(
        f"to a useful step, {name}; goal: of torch alone in place of a job, its limit",
        lambda found: 1e3 * found[name]["total"],
        lambda found: 1e3 * found[f"{name}, torch alone"]["total"],
    )


def _ratio(
    what: str, group: str, figure: str, by: str, goal: float, *, is_least: bool = False
) -> _Row:
    """A time by a limit, or the speed of that time by that of the limit."""

    def value(found: Found) -> float:
        ratio = found[group][figure] / _fastest(found[group], by)
        return 1 / ratio if is_least else ratio

    return _Row(what, value, lambda _: goal, "", is_least)


def _fastest(figures: dict[str, float], name: str) -> float:
    """A limit that was measured in several ways counts as the fastest of them."""
    ways: tuple[str, ...] = (name, name.replace("checksums", "checksums, O_DIRECT"))
    ways += (name.replace("write", "write, O_DIRECT"),)
    return min(figures[way] for way in ways if way in figures)


def _ratios(ranks: str, restored: float) -> list[_Row]:
    group = f"saves, {ranks}"
    back, copy = "memcpy back: seconds", "memcpy: seconds"
    memory, disk = "restore from memory: seconds", "restore from disk, warm: seconds"
    verified, few = "memcpy back with checksums: seconds", "restore from memory, few bytes: seconds"
    read = "raw read with checksums, warm: seconds"
    what = f"restore from the page cache, {ranks}, by a read with checksums"
    overlapped, eager = "ours, overlapped: blocked", "ours, eager: blocked"
    return [
        _ratio(
            f"restore from memory, {ranks}, by a copy", group, memory, back, restored, is_least=True
        ),
        _ratio(
            f"restore from memory, {ranks}, by a copy with checksums",
            group,
            memory,
            verified,
            0.9,
            is_least=True,
        ),
        _Row(
            f"of that, for tensors of few bytes, {ranks}; goal: a tenth of a copy with checksums",
            lambda found: 1e3 * found[group][few],
            lambda found: 1e2 * found[group][verified],
        ),
        _Row(
            f"restore from memory without that, {ranks}, by a copy with checksums",
            lambda found: found[group][verified] / (found[group][memory] - found[group][few]),
            lambda _: 0.9,
            "",
            is_least=True,
        ),
        _ratio(what, group, disk, read, 0.9, is_least=True),
        _ratio(f"overlapped save, {ranks}: blocked, by a copy", group, overlapped, copy, 0.15),
        _ratio(
            f"the same of plain threads that copy beside a pass, {ranks}: its limit",
            group,
            f"{BESIDE}: seconds",
            copy,
            0.15,
        ),
        _ratio(f"eager save, {ranks}: blocked, by a copy", group, eager, copy, 1.1),
    ]


def _step(name: str, what: str, goal_ms: float) -> _Row:
    return _Row(
        f"live state adds to a {name} ({what})",
        lambda found: 1e3 * found[name][what],
        lambda found: max(goal_ms, 10 * found[name]["plain"] if what == "time" else 0.0),
    )


def _restart(ranks: int) -> _Row:
    name = f"restart, {ranks} ranks"
    return _Row(
        f"{name}; goal: the least that Python processes do",
        lambda found: 1e3 * found[name]["seconds"],
        lambda found: 1e3 * found[name]["least"],
    )


_ROWS = (
    _total("exception, 1 MiB, kept"),
    _total("exception, 1 MiB"),
    _without_job("exception, 1 MiB"),
    _Row(
        "to a useful step, exception, 1 MiB, 4 ranks; goal: 1.5 times that of 2",
        lambda found: 1e3 * found["exception, 1 MiB, 4 ranks"]["total"],
        lambda found: 1.5e3 * found["exception, 1 MiB"]["total"],
    ),
    _without_job("exception, 1 MiB, 4 ranks"),
    _Row(
        "to a useful step, SIGKILL, 1 MiB",
        lambda found: 1e3 * found["SIGKILL, 1 MiB"]["total"],
        lambda _: 100.0,
    ),
    _without_job("SIGKILL, 1 MiB"),
    _total("SIGKILL, 256 MiB, kept", copies=1.3),
    _by_limit("SIGKILL, 256 MiB, kept"),
    _total("SIGKILL, 1 GiB, kept", copies=1.3),
    _by_limit("SIGKILL, 1 GiB, kept"),
    _step("step, 10 tensors", "time", 0.06),
    _Row(
        "live state adds to job.step() (10 tensors, processor time of its thread); goal: one look "
        "at torch's counters and at the generators of random numbers",
        lambda found: 1e3 * found["step, 10 tensors"]["thread"],
        lambda found: 1e3 * found["step, 10 tensors"]["looks"],
    ),
    _step("step, 1,000 tensors", "processor", 0.3),
    _step("step, 10,000 tensors", "processor", 3.0),
    _ratio(
        "the same of 1,000, by a pass over torch's counters of all",
        "step, 1,000 tensors",
        "processor",
        "pass",
        1.0,
    ),
    _ratio(
        "the same of 10,000, by a pass over torch's counters of all",
        "step, 10,000 tensors",
        "processor",
        "pass",
        1.0,
    ),
    *_ratios("1 rank", 0.9),
    *_ratios("4 ranks", 0.8),
    _ratio(
        "durable, 1 rank, by a raw write with fsync",
        "saves, 1 rank",
        "ours, eager: durable",
        "raw write: seconds",
        1.25,
    ),
    _ratio(
        "first save: blocked, by a copy into new memory",
        "first save",
        "ours, eager: blocked",
        "memcpy into new memory: blocked",
        1.1,
    ),
    _Row(
        "opening before the first save",
        lambda found: 1e3 * found["first save"]["ours, eager: open"],
        lambda _: 20.0,
    ),
    _Row(
        "10,000 parameters: first save, processor time of the training thread",
        lambda found: 1e3 * found["10,000 tensors"]["first save with moments"],
        lambda _: 300.0,
    ),
    _Row(
        "10,000 parameters: restore from disk; goal: torch.load and the loads of its parts",
        lambda found: 1e3 * found["10,000 tensors"]["`restore()` from disk"],
        lambda found: 1e3 * sum(found["10,000 tensors"][name] for name in LOADS),
    ),
    _restart(64),
    _restart(128),
    _Row(
        "restart of 4 ranks after a hang that is known; goal: as after an exception there",
        lambda found: 1e3 * found["hang"]["recovery"],
        lambda found: 1e3 * found["hang"]["exception"],
    ),
    _Row(
        "a hang is known, Adaptive with a floor of 100 ms",
        lambda found: 1e3 * found["hang"]["detection"],
        lambda _: 150.0,
    ),
)


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The table: each row with its goal."""
    now, before = data["found"]["now"], data["found"].get("before")
    rows = []
    for row in _ROWS:
        if (values := _of(row, now)) is None:
            continue
        figure, goal = values
        is_met = figure >= goal if row.is_least else figure <= goal
        old = None if before is None else _of(row, before)
        shown = [_shown(row, None if old is None else old[0])] if before is not None else []
        shown += [_shown(row, figure), _shown(row, goal), "met" if is_met else _missed(row, values)]
        rows.append((row.what, *shown))
    columns = ("", *(("before",) if before is not None else ()), "now", "goal", "verdict")
    note = (
        "Milliseconds, or a ratio; medians. Goals are of the same run: re-entry and a step as they "
        "were measured, a copy, a raw read or write. A useful step: no other one is made again."
    )
    return [Sheet("Costs beside their limits", columns, rows, note)]


def _of(row: _Row, found: Found) -> tuple[float, float] | None:
    try:
        return row.figure(found), row.goal(found)
    except KeyError:  # a quick run leaves out some
        return None


def _missed(row: _Row, values: tuple[float, float]) -> str:
    figure, goal = values
    ratio = goal / figure if row.is_least else figure / goal if goal else figure
    return f"missed, {ratio:.1f} x"


def _shown(row: _Row, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if not row.unit or value < 10 else f"{value:,.0f}"
