"""Runs the tests and the measurements on a GPU, each part within its limit of time (`plan.py`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.gpu.measurements import MEASUREMENTS, machine
from benchmarks.gpu.plan import MEASURED_S, ONE_GPU, ONE_GPU_S, SEVERAL_GPUS, Part
from benchmarks.gpu.results import Figure, Outcome, Results, read_junit

ROOT = Path(__file__).parents[2]
_MEASUREMENT_S = 100.0
_REPORT_S = 20.0


def run_all(out: Path) -> int:
    """Runs everything on the CUDA devices, and writes the results; returns the exit code."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    tests = run_parts(ONE_GPU, out, began + ONE_GPU_S - MEASURED_S)
    figures: list[Figure] = []
    for measure in MEASUREMENTS:
        left = ONE_GPU_S - (time.monotonic() - began)
        figures += run_measurement(measure.__name__, left)
    if torch.cuda.device_count() > 1:
        several = sum(part.limit_s for part in SEVERAL_GPUS)
        tests += run_parts(SEVERAL_GPUS, out, time.monotonic() + several)
    results = Results(machine(), tests, figures, time.monotonic() - began)
    results.write(out)
    print(results.to_markdown())
    print(f"written to {out / 'results.json'} and {out / 'results.md'}")
    return 0 if results.passed else 1


def run_parts(parts: Iterable[Part], out: Path, until: float) -> list[Outcome]:
    """The outcomes of the parts, one after the other; one for which no time is left has failed."""
    found: list[Outcome] = []
    for number, part in enumerate(parts):
        limit_s = min(part.limit_s, until - time.monotonic())
        stopped = "no time was left"
        if limit_s > 0:
            print(f"make gpu: {part.name}, {limit_s:.0f} s at most", flush=True)
            outcomes, stopped = run_tests(out / f"part{number}.xml", limit_s, *part.tests)
            found += outcomes
        if stopped:
            found.append(Outcome(part.name, "failed", max(0.0, limit_s), stopped))
    return found


def run_tests(report: Path, limit_s: float, *paths: str) -> tuple[list[Outcome], str]:
    """Runs tests marked `gpu`; returns their outcomes, and why the run ended early."""
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--timeout", "100", "-q"]
    # By the signal, a test that is too slow ends alone; by the thread, its whole run would.
    command += ["--timeout-method=signal", f"--junitxml={report}", *paths]
    stopped = ""
    process = subprocess.Popen(command, cwd=ROOT, env=_environment())
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        stopped = f"it took more than {limit_s:.0f} s"
        process.send_signal(signal.SIGINT)  # pytest reports what it has run
        try:
            process.wait(_REPORT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if not report.exists():
        return [], stopped or f"pytest ended with code {process.returncode} and without a report"
    return read_junit(report), stopped


def run_measurement(name: str, limit_s: float) -> list[Figure]:
    """Runs one measurement in a process of its own: a CUDA error ends only that one."""
    command = [sys.executable, "-m", "benchmarks.gpu.measurements", name]
    try:
        if limit_s <= 0:
            raise subprocess.TimeoutExpired(command, limit_s)
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=_environment(),
            timeout=min(limit_s, _MEASUREMENT_S),
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [Figure(name, "", None, error="it ran out of time")]
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [Figure(name, "", None, error=f"exit code {done.returncode}: {last}")]
    return [Figure(**entry) for entry in json.loads(done.stdout.splitlines()[-1])]


def _environment() -> dict[str, str]:
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
