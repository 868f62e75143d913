"""Runs the tests and the measurements on a GPU, each within its share of nine minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.measurements import MEASUREMENTS, machine
from benchmarks.gpu.results import Figure, Outcome, Results, read_junit

ROOT = Path(__file__).parents[2]
_LIMIT_S = 520.0  # all together
_TESTS_S = 330.0
_MEASUREMENT_S = 100.0


def run_all(out: Path) -> int:
    """Runs everything on the CUDA device, and writes the results; returns the exit code."""
    began = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    tests, stopped = run_tests(out / "tests.xml", _TESTS_S)
    figures: list[Figure] = []
    for measure in MEASUREMENTS:
        left = _LIMIT_S - (time.monotonic() - began)
        figures += run_measurement(measure.__name__, left)
    results = Results(machine(), tests, figures, time.monotonic() - began, stopped)
    results.write(out)
    print(results.to_markdown())
    print(f"written to {out / 'results.json'} and {out / 'results.md'}")
    return 0 if results.passed else 1


def run_tests(report: Path, limit_s: float, *paths: str) -> tuple[list[Outcome], str]:
    """Runs the tests marked `gpu`; returns their outcomes, and why the run ended early."""
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--timeout", "100", "-q"]
    command += [f"--junitxml={report}", *(paths or ("tests/gpu",))]
    stopped = ""
    try:
        subprocess.run(command, cwd=ROOT, env=_environment(), timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        stopped = f"the tests took more than {limit_s:g} s"
    if not report.exists():
        return [], stopped or "pytest ended without a report"
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
