"""Time from a fault to the first useful step, and goodput, of whole systems with the same faults.

Every system trains the same model on the same data, with two ranks, and saves every 50 steps. The
faults come at fixed times after the first step, exceptions and SIGKILLs in turn, on each rank in
turn. A step is useful if no rank had completed it before the fault. Goodput is the number of steps
reached by the deadline, times the length of a step without faults and saves, by the time.
"""

from __future__ import annotations

import itertools
import json
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.lib.sheets import Sheet, median, quantile
from benchmarks.recovery.contenders import CONTENDERS, RANKS, Contender, environment

__all__ = ["run", "sheets"]

_EVERY = 50  # steps between two saves
_START_S = 120.0
_KINDS = ("exception", "sigkill")


def run(quick: bool) -> dict[str, Any]:
    """Measures every contender that is installed, at each interval between faults, in seconds. With
    `quick`, two of them.
    """
    duration, intervals = (12.0, (5.0,)) if quick else (310.0, (60.0, 10.0))
    plain = _plain_step(5.0 if quick else 60.0)
    found: dict[str, Any] = {"plain_step": plain, "duration": duration, "systems": {}}
    for contender in CONTENDERS[:2] if quick else CONTENDERS:
        if not contender.installed:
            print(f"recovery: {contender.needs} is not installed", flush=True)
            continue
        for interval in intervals:
            print(f"recovery: {contender.name}, a fault every {interval:g} s", flush=True)
            log = _job(contender, _plan(duration, interval), duration)
            result = _figures(log, duration, plain)
            found["systems"].setdefault(contender.name, {})[f"{interval:g}"] = result
    return found


def _plan(duration: float, interval: float) -> list[dict[str, Any]]:
    """The last fault leaves half an interval for its recovery."""
    faults: list[dict[str, Any]] = []
    while (at := interval * (len(faults) + 1)) <= duration - interval / 2:
        number = len(faults)
        kind, rank = _KINDS[number % 2], number // 2 % RANKS
        faults.append({"at": at, "rank": rank, "kind": kind})
    return faults


def _plain_step(duration: float) -> float:
    """Seconds of a step without faults and saves, under torchrun."""
    contender = next(each for each in CONTENDERS if each.name == "torchrun, torch.save")
    log = _job(contender, [], duration, every=10**9)
    times: list[float] = [
        line["at"] for line in log if line["event"] == "step" and line["rank"] == 0
    ]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def _job(
    contender: Contender, faults: list[dict[str, Any]], duration: float, every: int = _EVERY
) -> list[dict[str, Any]]:
    """Runs one job until its deadline; returns its log."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps({"faults": faults, "every": every}))
        processes: list[subprocess.Popen[bytes]] = []
        with (folder / "output.log").open("ab") as output:
            try:
                for command, variables in contender.commands():
                    processes.append(
                        subprocess.Popen(
                            command,
                            env=environment(folder, variables),
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=output,
                            start_new_session=True,
                        )
                    )
                started = _await_start(folder, processes)
                _sleep_until(started + duration, processes, folder)
            finally:
                _end(processes)
        lines = (folder / "said.log").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _await_start(folder: Path, processes: list[subprocess.Popen[bytes]]) -> float:
    deadline = time.monotonic() + _START_S
    while not (text := _read(folder / "started")):
        _check(processes, folder)
        if time.monotonic() > deadline:
            raise RuntimeError(f"no first step within {_START_S:g} s:\n{_tail(folder)}")
        time.sleep(0.05)
    return float(text)


def _sleep_until(moment: float, processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    while (left := moment - time.monotonic()) > 0:
        _check(processes, folder)
        time.sleep(min(left, 0.5))


def _check(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    for process in processes:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.poll()}:\n{_tail(folder)}")


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kills the launchers and everything they have started."""
    victims = []
    for process in processes:
        if process.poll() is None:
            started = psutil.Process(process.pid)
            victims += [started, *started.children(recursive=True)]
    for victim in victims:
        try:
            victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    for process in processes:
        process.wait()
    psutil.wait_procs(victims, timeout=10)


def _figures(log: list[dict[str, Any]], duration: float, plain: float) -> dict[str, Any]:
    steps = [(line["at"], line["step"]) for line in log if line["event"] == "step"]
    steps.sort()
    started = steps[0][0]
    recoveries: dict[str, list[float | None]] = {}
    for fault in (line for line in log if line["event"] == "fault"):
        before = max(step for at, step in steps if at <= fault["at"])
        useful = [at for at, step in steps if at > fault["at"] and step > before]
        seconds = min(useful) - fault["at"] if useful else None
        recoveries.setdefault(fault["kind"], []).append(seconds)
    reached = max((step for at, step in steps if at <= started + duration), default=0)
    return {"recoveries": recoveries, "steps": reached, "goodput": reached * plain / duration}


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The tables of the results."""
    intervals = list(next(iter(data["systems"].values())))
    rows = []
    for name, found in data["systems"].items():
        row = [name]
        for kind in _KINDS:
            values = [
                value
                for interval in intervals
                for value in found[interval]["recoveries"].get(kind, [])
            ]
            row.append(_spread(values))
        row += [f"{found[interval]['goodput']:.1%}" for interval in intervals]
        rows.append(tuple(row))
    heads = [f"goodput, a fault every {interval} s" for interval in intervals]
    return [
        Sheet(
            f"From a fault to the first useful step, and goodput; {RANKS} ranks, gloo",
            ("system", "exception: median (p90) s", "SIGKILL: median (p90) s", *heads),
            rows,
            f"Each job ran for {data['duration']:g} s from its first step. A step without faults "
            f"and saves takes {data['plain_step'] * 1000:.1f} ms. nvidia-resiliency-ext saves with "
            "torch.save, since its own asynchronous save needs CUDA; torchft saves nothing.",
        )
    ]


def _spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "never" if values else "-"
    text = f"{median(known):.2f} ({quantile(known, 0.9):.2f})"
    missing = len(values) - len(known)
    return f"{text}, {missing} never" if missing else text


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _tail(folder: Path) -> str:
    return (folder / "output.log").read_text(errors="replace")[-3000:]
