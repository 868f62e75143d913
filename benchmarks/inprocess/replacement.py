"""A rank killed by SIGKILL under `outlast run`, until all ranks are in the function again: replaced
by a standby process, and by a new one.

The function does what most do: it imports torch, creates a gloo group and a small model with DDP,
and steps. One rank kills itself after the launcher has said that a standby is ready.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lib.sheets import Sheet, median, ms, quantile

__all__ = ["run", "sheets"]

RANKS = 4
KILLED = 2
NET_S = 300.0

SCRIPT = """
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from outlast import inprocess

FOLDER = Path(__file__).parent


@inprocess.Wrapper(repeated_faults=None)
def train(call=None):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rank = dist.get_rank()
    stop = torch.zeros(1)
    while not stop.item():
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        call.ping()
        time.sleep(0.002)
        if rank == 0:
            (FOLDER / f"stepped-{call.iteration}").touch()
            stop.fill_((FOLDER / "stop").exists())
        dist.broadcast(stop, 0)
    del model
    dist.destroy_process_group()


torch.set_num_threads(1)
train()
"""


def run(quick: bool) -> dict[str, Any]:
    """Seconds from the end of the killed process to the last entry, for both kinds."""
    kills = 2 if quick else 12
    return {name: _measure(name, size, kills) for name, size in (("standby", 1), ("new", 0))}


def _measure(name: str, standbys: int, kills: int) -> list[float]:
    print(f"replacement: {name}, {kills} kills", flush=True)
    with tempfile.TemporaryDirectory(prefix="outlast-benchmark-") as text:
        folder = Path(text)
        script = folder / "train.py"
        script.write_text(SCRIPT)
        options = [f"--nproc-per-node={RANKS}", f"--standby={standbys}", "--backoff=0"]
        options += [f"--max-restarts={kills}", f"--events-dir={folder / 'events'}"]
        command = [sys.executable, "-m", "outlast.launch", "run", *options, str(script)]
        with (folder / "err").open("wb") as err, subprocess.Popen(command, stderr=err) as launcher:
            try:
                for number in range(kills):
                    _kill(folder, launcher, number, standbys)
                _await(launcher, lambda: (folder / f"stepped-{kills}").exists())
                (folder / "stop").touch()
                launcher.wait(NET_S)
            finally:
                launcher.terminate()
        return _times(folder / "events", kills)


def _kill(folder: Path, launcher: subprocess.Popen[bytes], number: int, standbys: int) -> None:
    """Kills a rank, once the job steps in its iteration and a standby is ready."""
    said = folder / "err"
    ready = re.compile(r"standby pid \d+ is ready")
    _await(launcher, lambda: (folder / f"stepped-{number}").exists())
    if standbys:
        _await(launcher, lambda: len(ready.findall(said.read_text())) > number)
    pids = re.findall(rf"rank {KILLED} is (?:now )?pid (\d+)", said.read_text())
    os.kill(int(pids[-1]), signal.SIGKILL)


def _await(launcher: subprocess.Popen[bytes], happened: Callable[[], object]) -> None:
    """Waits for what only files show."""
    deadline = time.monotonic() + NET_S
    while not happened():
        if launcher.poll() is not None:
            raise RuntimeError(f"the job ended too early, with code {launcher.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited in vain for {NET_S:g} s")
        time.sleep(0.01)


def _times(events: Path, kills: int) -> list[float]:
    """From the first event about the loss to the last entry of the iteration that follows."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in events.rglob("*.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            found.setdefault(event["kind"], []).append(event)
    ends = sorted(e["time"] for e in found["worker_exited"])[:kills]
    entries = found["entered"]
    return [
        max(e["time"] for e in entries if e["iteration"] == number + 1) - end
        for number, end in enumerate(ends)
    ]


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The table of the results."""
    names = {"standby": "standby process", "new": "new process (`--standby 0`)"}
    rows = [
        (
            names[name],
            str(len(taken)),
            ms(min(taken)),
            ms(median(taken)),
            ms(quantile(taken, 0.9)),
            ms(max(taken)),
        )
        for name, taken in data.items()
    ]
    return [
        Sheet(
            f"A rank killed by SIGKILL and replaced under `outlast run`, {RANKS} ranks (ms)",
            ("replaced by", "kills", "best", "median", "90 %", "worst"),
            rows,
            "From the end of the process, as the launcher sees it, to the last rank's entry into "
            "the function.",
        )
    ]
