"""How many modules a journey through this package takes, and how often it changes the module.

A profiler counts, in all threads of one rank's main process, each call of a function from a module
of `outlast` into another one. Two ranks; the exception is raised on the rank that counts.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast
from benchmarks.lib.rank_processes import RankProcesses, wrapped
from benchmarks.lib.sheets import Sheet
from outlast import inprocess

__all__ = ["run", "sheets"]

FAULT = ("an exception, until it is in the function again", "Job(...)", "job.restore()")
SAVE = "job.step() that saves, on rank 0, without the writer process"
_RAISES = 1
_EVERY = 2  # steps between two saves


class Counts:
    """Counts while `journey` is open; threads that exist before it are counted too."""

    def __init__(self) -> None:
        self.calls: dict[str, collections.Counter[tuple[str, str]]] = {}
        self._now: collections.Counter[tuple[str, str]] | None = None
        threading.setprofile(self._count)
        sys.setprofile(self._count)

    def begin(self, name: str) -> None:
        self._now = self.calls[name] = collections.Counter()

    def end(self) -> None:
        self._now = None

    @contextlib.contextmanager
    def journey(self, name: str) -> Iterator[None]:
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or self._now is None or frame.f_back is None:
            return
        callee = frame.f_globals.get("__name__", "")
        caller = frame.f_back.f_globals.get("__name__", "")
        if callee != caller and callee.startswith("outlast") and caller.startswith("outlast"):
            self._now[caller, callee] += 1


def run(quick: bool) -> dict[str, Any]:
    """The pairs of modules of each journey, and the calls from the one into the other."""
    with RankProcesses("journeys", 2) as processes, tempfile.TemporaryDirectory() as folder:
        processes.start_all(lambda slot: _rank(slot, Path(folder), processes.folder))
        processes.wait_all(120)
        found: dict[str, Any] = {}
        for slot in range(2):
            found |= json.loads((processes.folder / f"calls{slot}.json").read_text())
    return found


def _rank(slot: int, folder: Path, results: Path) -> None:
    counts = Counts()

    def train(call: inprocess.CallWrapper) -> None:
        dist.init_process_group("gloo")
        model = nn.Linear(16, 16)
        replica = DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters())
        again = call.iteration > 0
        counts.end()
        counts.begin(FAULT[1])
        job = outlast.Job(folder, model=model, optimizer=optimizer, every=_EVERY)
        counts.end()
        with job:
            with counts.journey(FAULT[2]):
                job.restore()
            for number in range(4):
                replica(torch.ones(2, 16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if again and (job.steps + 1) % _EVERY == 0:
                    with counts.journey(SAVE):
                        job.step()
                else:
                    job.step()
                if not again and number == 2:
                    dist.barrier()
                    if slot == _RAISES:
                        counts.begin(FAULT[0])
                        raise ValueError("planned")
                    threading.Event().wait()
        dist.destroy_process_group()

    wrapped(train, inprocess.Wrapper())()
    wanted = FAULT if slot == _RAISES else (SAVE,)
    found = {name: [[*pair, n] for pair, n in counts.calls[name].items()] for name in wanted}
    with open(os.path.join(results, f"calls{slot}.json"), "w") as file:
        json.dump(found, file)


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The table: one row for each journey, and one for those that every fault takes."""
    together = [call for name in FAULT for call in data[name]]
    rows = {**{name: data[name] for name in FAULT}, "these three": together, SAVE: data[SAVE]}
    return [
        Sheet(
            "Journeys",
            ("journey", "modules", "calls between modules"),
            [(name, str(len(_modules(found))), str(_calls(found))) for name, found in rows.items()],
        )
    ]


def _modules(calls: list[Any]) -> set[str]:
    return {module for caller, callee, _ in calls for module in (caller, callee)}


def _calls(calls: list[Any]) -> int:
    return sum(n for *_, n in calls)
