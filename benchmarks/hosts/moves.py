"""The pause of a training when a host leaves and a spare takes its place, beside other ways.

Two hosts in network namespaces with a rank each, and a spare. FSDP2: each rank has shards that no
other one has. The host of rank 1 leaves (`outlast drain`), or dies; or the job is stopped, and
started again. Then torchrun trains the same, and a rank of it is killed.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.hosts.moved_training import AFTER, EVERY, PARTS
from benchmarks.lib.sheets import Sheet, ms
from benchmarks.rollback.limits import limits

__all__ = ["run", "sheets"]

_EXAMPLE = Path(__file__).parents[2] / "examples" / "hosts"
_SCRIPT = Path(__file__).with_name("moved_training.py")
_NAMES = ("h1", "h2", "h3")
_ENDPOINTS = ",".join(f"{name}:29400" for name in _NAMES)
_LIMIT_S = 240.0
_CASES = ((1, 5, 2), (256, 5, 2), (1024, 3, 1))
"""MiB of state a rank, how many moves, and how many of each other kind."""
_NEEDED = 16
"""Times the state of a rank that must be free: models, moments, gradients, two snapshots."""
_WAYS = {
    "move": "the host leaves, a spare takes its place",
    "stop": "the job is stopped, and started again",
    "death": "the host dies, a spare takes its place",
    "torchrun": "torchrun, a rank is killed",
}


class _Job:
    """A training on hosts of its own: its launchers, and what its ranks have noted."""

    def __init__(self, network: Any, folder: Path, mib: int, *, torchrun: bool = False) -> None:
        self.network, self.folder, self._torchrun = network, folder, torchrun
        self._fail = folder / "fail"
        self._training = [str(_SCRIPT), f"--state={folder}/state", f"--trace={folder}/trace"]
        self._training += [f"--fail={self._fail}", f"--mib={mib}"]
        (folder / "trace").mkdir()
        self.launchers: dict[str, Any] = {}
        self._logs: dict[str, Path] = {}
        self._starts = itertools.count()

    def start(self, host: str) -> None:
        """Starts a launcher, with default options: a spare host keeps a standby process."""
        run = ["-m", "outlast.launch", "run", "--nnodes=2", "--rdzv-id=bench", *self._meet()]
        run += [f"--rdzv-conf=record_dir={self.folder}/records", "--max-restarts=100"]
        run += [f"--events-dir={self.folder}/events", *self._training]
        if self._torchrun:
            run = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
            run += ["--max-restarts=100", "--monitor-interval=0.1", "--rdzv-backend=c10d"]
            run += ["--rdzv-endpoint=h1:29400", *self._training, "--torchrun"]
        log = self._logs[host] = self.folder / f"{next(self._starts)}-{host}.log"
        self.launchers[host] = self._on(host, run, log)

    def drain(self, host: str, at: str) -> None:
        """Runs `outlast drain` on a host."""
        command = ["-m", "outlast.launch", "drain", host, "--rdzv-id=bench", *self._meet()]
        self._on(at, command, self.folder / f"{next(self._starts)}-drain.log")

    def await_spare(self) -> str:
        """The host without a rank, once its standby process is ready."""
        host = next(name for name in _NAMES if name not in self.training())
        ready = re.compile(r"standby pid \d+ is ready")
        self.until(lambda: ready.search(self._logs[host].read_text()), f"a standby on {host}")
        return host

    def training(self) -> list[str]:
        """The hosts on which ranks 0 and 1 made their last steps."""
        hosts = {step["rank"]: step["host"] for step in self.steps()}
        return [hosts[rank] for rank in (0, 1)]

    def fail(self) -> dict[str, Any]:
        """Has rank 1 fail; its note, once it has come."""
        known = len(self._noted("fault"))
        self._fail.touch()
        self.until(lambda: len(self._noted("fault")) > known, "the fault")
        return self._noted("fault")[-1]

    def first_step(self, after: float, reached: int) -> dict[str, Any]:
        """The step after `reached` that all ranks had made first after a time: its last line."""

        def found() -> dict[str, Any] | None:
            steps = [s for s in self.steps() if s["time"] > after and s["step"] == reached + 1]
            return max(steps, key=lambda s: float(s["time"])) if len(steps) == 2 else None

        return self.until(found, f"step {reached + 1}")  # type: ignore[no-any-return]

    def steps(self) -> list[dict[str, Any]]:
        return self._noted("step")

    def reached(self, iteration: int) -> tuple[int, float]:
        """The last step of an iteration, and when the last rank had made it."""
        steps = [s for s in self.steps() if s["iteration"] <= iteration]
        last = max(s["step"] for s in steps)
        return last, max(s["time"] for s in steps if s["step"] == last)

    def events(self, kind: str) -> list[float]:
        return [e["time"] for e in self._lines("events/**/*.jsonl") if e["kind"] == kind]

    def until(self, found: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + _LIMIT_S
        while not (value := found()):
            if time.monotonic() > deadline:
                logs = [log.read_text()[-2000:] for log in self.folder.glob("*.log")]
                raise TimeoutError("\n".join([f"waited in vain for {what}", *logs]))
            time.sleep(0.02)
        return value

    def _on(self, host: str, command: list[str], log: Path) -> Any:
        temporary = self.folder / f"tmp-{host}"
        temporary.mkdir(exist_ok=True)
        environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
        environment["PYTHONUNBUFFERED"] = "1"
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        with log.open("wb") as out:
            program = [sys.executable, *command]
            return self.network[host].start(
                program, environment, self.folder, stdout=out, stderr=out
            )

    def _meet(self) -> list[str]:
        return [f"--rdzv-endpoint={_ENDPOINTS}"]

    def _noted(self, what: str) -> list[dict[str, Any]]:
        lines = [line for line in self._lines("trace/*.jsonl") if what in line]
        return sorted(lines, key=lambda line: float(line["time"]))

    def _lines(self, pattern: str) -> list[dict[str, Any]]:
        """The records of all hosts, with times of the machine's clock."""
        found = []
        for file in self.folder.glob(pattern):
            for line in file.read_text().splitlines(keepends=True):
                record = json.loads(line) if line.endswith("\n") else {}
                if record.get("host") in self.network.names:
                    offset_s = self.network[record["host"]].clock_offset_s
                    record["time"] -= offset_s
                    record["marks"] = [each - offset_s for each in record.get("marks", ())]
                    found.append(record)
        return found


def run(quick: bool) -> dict[str, Any]:
    """Measures each way with each size."""
    sys.path.insert(0, str(_EXAMPLE))
    module = importlib.import_module("network")
    if reason := module.unavailable():
        sys.exit(f"no hosts can be made: {reason}")
    sizes: dict[str, Any] = {}
    for mib, moves, others in ((1, 1, 1),) if quick else _CASES:
        if psutil.virtual_memory().available < _NEEDED * mib << 20:
            print(f"moves: too little memory for {mib} MiB a rank", flush=True)
            continue
        found: dict[str, Any] = {"limits": limits(mib << 20, 1 if quick else 5)}
        with tempfile.TemporaryDirectory() as name, module.Network(_NAMES) as network:
            job = _Job(network, Path(name), mib)
            for host in _NAMES:
                job.start(host)
            job.first_step(0.0, reached=0)
            for way, times in ((_move, moves), (_death, others), (_stop, others)):
                found[way.__name__[1:]] = [_shown(mib, way, job) for _ in range(times)]
        with tempfile.TemporaryDirectory() as name, module.Network(_NAMES[:2]) as network:
            job = _Job(network, Path(name), mib, torchrun=True)
            for host in network.names:
                job.start(host)
            job.first_step(0.0, reached=0)
            found["torchrun"] = [_shown(mib, _torchrun, job) for _ in range(others)]
        sizes[str(mib)] = found
    return {"sizes": sizes}


def _shown(mib: int, way: Callable[[_Job], dict[str, Any]], job: _Job) -> dict[str, Any]:
    found = way(job)
    print(f"moves: {mib} MiB, {way.__name__[1:]}: {found['pause']:.3f} s", flush=True)
    return found


def _move(job: _Job) -> dict[str, Any]:
    job.await_spare()
    stays, leaves = job.training()
    iteration = job.steps()[-1]["iteration"]
    job.drain(leaves, at=stays)
    job.until(lambda: job.launchers[leaves].poll() is not None, f"the end of {leaves}")
    reached, before = job.reached(iteration)
    first = job.first_step(before, reached)
    seen = min(at for at in job.events("seen") if at > before)
    assert not _again(job, first)
    entered = max(at for at in job.events("entered") if seen < at < first["time"])
    marks = first["marks"]
    lengths = [later - earlier for earlier, later in itertools.pairwise(marks)]
    parts = {"last step to end": seen - before, "re-entry": marks[0] - seen}
    parts |= dict(zip(PARTS, lengths, strict=True))
    later = [s["seconds"] for s in job.steps() if s["iteration"] == iteration]
    job.start(leaves)
    return {
        "pause": first["time"] - before,
        "again": 0,
        "entry": entered - seen,
        "parts": parts,
        "step": statistics.median(later),
    }


def _death(job: _Job) -> dict[str, Any]:
    job.await_spare()
    fault = job.fail()
    dead, host = time.monotonic(), fault["host"]
    job.network[host].power_off()
    first = job.first_step(dead, fault["fault"])
    job.network.boot(host)
    job.start(host)
    return {"pause": first["time"] - dead, "again": _again(job, first)}


def _stop(job: _Job) -> dict[str, Any]:
    job.await_spare()
    for launcher in job.launchers.values():
        launcher.send_signal(signal.SIGTERM)
    for launcher in job.launchers.values():
        job.until(lambda each=launcher: each.poll() is not None, "the end of the job")  # type: ignore[misc]
    reached, before = job.reached(sys.maxsize)
    for host in _NAMES:
        job.start(host)
    first = job.first_step(before, reached)
    return {"pause": first["time"] - before, "again": 0}


def _torchrun(job: _Job) -> dict[str, Any]:
    fault = job.fail()
    first = job.first_step(fault["time"], fault["fault"])
    return {"pause": first["time"] - fault["time"], "again": _again(job, first)}


def _again(job: _Job, first: dict[str, Any]) -> int:
    """How many steps were made again before `first`."""
    began = first["marks"][0]
    return int(first["step"] - min(s["step"] for s in job.steps() if s["time"] > began))


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The pauses with their ratios, and what a move consists of."""
    pauses, parts = [], []
    names = ["last step to end", "re-entry", *PARTS]
    for mib, found in data["sizes"].items():
        moved = statistics.median(each["pause"] for each in found["move"])
        for way, text in _WAYS.items():
            each = [one["pause"] for one in found[way]]
            pause, again = statistics.median(each), max(one["again"] for one in found[way])
            figures = (ms(pause), ms(max(each)), f"{pause / moved:.1f} x", f"{again}")
            pauses.append((f"{mib} MiB: {text}", f"{len(each)}", *figures))
        entry, step = (
            statistics.median(one[name] for one in found["move"]) for name in ("entry", "step")
        )
        goal = entry + step + 2 * found["limits"]["socket"]
        each = [statistics.median(one["parts"][name] for one in found["move"]) for name in names]
        verdict = "met" if moved <= goal else f"{moved / goal:.1f} x"
        shown = (*map(ms, each), ms(moved), ms(step), ms(found["limits"]["socket"]), ms(goal))
        parts.append((f"{mib} MiB", *shown, verdict))
    return [
        Sheet(
            "The pause when a host leaves: FSDP2, Adam, 2 hosts with a rank each, gloo (ms)",
            ("state a rank", "times", "median", "worst", "by a move", "steps made again"),
            pauses,
            "To the end of the first step beyond all before: from the end of the step before for a "
            "move and a stop, else from the fault, which comes "
            f"{AFTER} steps after a checkpoint; one is made every {EVERY} steps. Hosts are network "
            "namespaces on one machine, the options of all launchers the default ones: a spare has "
            "a standby process, and a dead host is declared lost after 6 s.",
        ),
        Sheet(
            "What the pause of a move consists of (ms)",
            ("state a rank", *names, "total", "a step", "the copy", "goal", "verdict"),
            parts,
            "Medians of the slowest rank. Goal: re-entry, a step and twice the copy, which is the "
            "state of a rank over a loopback socket.",
        ),
    ]
