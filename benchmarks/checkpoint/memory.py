"""The memory of a save, over all processes that take part in it, and of 200 saves in a row.

The measure is the proportional set size (PSS), which counts a shared page once: the training
process and the writer both map the snapshot. This process takes samples while the other one saves.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.checkpoint.saves import call, disk_folder, in_ranks
from benchmarks.checkpoint.training_state import Size, Training
from benchmarks.checkpoint.ways import chosen, make
from benchmarks.lib.rank_processes import RankProcesses
from outlast.async_checkpoint import Checkpointer, Retention
from outlast.async_checkpoint.storage.protocol import WORKING
from outlast.async_checkpoint.storage.recycled_files import RECYCLED

__all__ = ["WHAT", "flat", "peaks"]

NAMES = {
    "ours, eager": 1,
    "ours, overlapped": 1,
    "ours, eager, 2 in flight": 2,
    "dcp.async_save": 1,
    "async_save, cached stager": 1,
    "async_save, cached stager, a process": 1,
    "fork": 1,
    "torch-checkpointing": 1,
    "lm-resiliency": 1,
}
"""The maximum number of saves in flight."""
_TRAINS, _SAVES, _ENDS = 1, 2, 3
WHAT = ("descriptors", "threads", "memory of its own, MiB")


def peaks(size: Size, saves: int, *, quick: bool = False) -> dict[str, Any]:
    """For each way: the bytes of the state, saves in flight, and the peak above training alone."""
    print(f"checkpoint: peak of memory over {saves} saves", flush=True)
    found = {}
    for name in list(NAMES)[:2] if quick else chosen(NAMES, quick):
        phase = mmap.mmap(-1, mmap.PAGESIZE)
        with RankProcesses("checkpoint-memory", 1) as processes:
            work = functools.partial(_saves, name, size, saves, phase)
            processes.start(0, functools.partial(call, 0, 1, work, processes.folder))
            base, peak = _sample(processes, phase)
            state = json.loads((processes.folder / "found0.json").read_text())
        found[name] = {"in_flight": NAMES[name], "state": state, "above": peak - base}
    return found


def _saves(name: str, size: Size, saves: int, phase: mmap.mmap, _: int) -> int:
    """Saves back to back, with a step after each if the way uses memory only during steps."""
    job = Training(size)
    with disk_folder() as folder:
        phase[0] = _TRAINS
        enough = time.monotonic() + 0.5
        while time.monotonic() < enough:
            job.train()
        phase[0] = _SAVES
        way = make(name, folder, job)
        for step in range(saves):
            wait = way.save(job.state_dict(), step)
            if name in ("fork", "ours, overlapped"):
                job.train()
            if name == "fork":
                wait()
        phase[0] = _ENDS
        way.close()
    return job.size_bytes


def _sample(processes: RankProcesses, phase: mmap.mmap) -> tuple[int, int]:
    """The peak bytes of training without saves, and with saves."""
    peaks = {_TRAINS: 0, _SAVES: 0}
    while not processes.ended(0.002):
        now = phase[0]
        if now in peaks:
            found = _pss(processes.pids[0])
            if phase[0] == now:
                peaks[now] = max(peaks[now], found)
    processes.check()
    return peaks[_TRAINS], peaks[_SAVES]


def _pss(pid: int) -> int:
    """The PSS of a process and its descendants; the share of this process is constant."""
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except (OSError, ProcessLookupError):
            continue  # it has ended meanwhile
        total += sum(int(line.split()[1]) for line in text.splitlines() if line[:4] == "Pss:")
    return total << 10


def flat(size: Size, saves: int, every: int) -> dict[str, list[list[float]]]:
    """Samples of the training process and of the writer, every few saves."""
    print(f"checkpoint: {saves} saves in a row", flush=True)
    found: dict[str, list[list[float]]] = in_ranks(
        "checkpoint-flat", 1, lambda _: _flat(size, saves, every)
    )[0]
    return found


def _flat(size: Size, saves: int, every: int) -> dict[str, list[list[float]]]:
    job = Training(size)
    samples: dict[str, list[list[float]]] = {"training": [], "writer": []}
    with (
        disk_folder() as folder,
        Checkpointer(
            folder / "flat", keep=Retention(last=2), overlap=job.optimizer
        ) as checkpointer,
    ):
        for number in range(saves + 1):
            handle = checkpointer.save(number, job.state_dict())
            job.train()
            handle.wait()
            if number % every == 0:
                _await_rest(folder / "flat")
                (writer,) = psutil.Process().children()
                samples["training"].append([number, *_resources(os.getpid())])
                samples["writer"].append([number, *_resources(writer.pid)])
    return samples


def _await_rest(path: Path) -> None:
    """Waits until the writer has removed old checkpoints in the background."""
    shown = ("step-", WORKING)
    while sum(name.startswith(shown) and name != RECYCLED for name in os.listdir(path)) > 2:
        time.sleep(0.001)


def _resources(pid: int) -> list[float]:
    process = psutil.Process(pid)
    return [
        process.num_fds(),
        process.num_threads(),
        process.memory_full_info().uss / 2**20,
    ]
