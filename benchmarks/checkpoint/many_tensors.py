"""A state of many small tensors: what a save and a restore do that is not copying bytes.

Two ranks with DDP, gloo and Adam, which has three tensors for each parameter. The job continues
from its survivors after an exception; then new processes restore its checkpoint.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast
from benchmarks.checkpoint.limits import Writing, settle
from benchmarks.lib.rank_processes import FOLDER, RankProcesses, wrapped
from benchmarks.lib.sheets import Sheet, ms
from outlast import inprocess
from outlast.system.files import fsync_folder

__all__ = ["LOADS", "measure", "run", "sheets"]

LOADS = (
    "limit: `torch.load`",
    "limit: torch's load of the model",
    "limit: torch's load of the optimizer",
)
"""Together they are what torch needs for a restore."""

_WIDTH, _PATIENCE_S = 16, 900.0


def run(quick: bool) -> dict[str, Any]:
    """Measures each number of parameters, with all layers in one `Sequential`."""
    return {str(n): measure(n) for n in ((40,) if quick else (2_000, 10_000))}


def measure(parameters: int) -> dict[str, Any]:
    print(f"many-tensors: {parameters} parameters", flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.absolute(), prefix="many-") as name:
        folder, found = Path(name), dict[str, Any]()
        for work in (_saves, _restores):
            with RankProcesses("many-tensors", 2) as processes:
                processes.start_all(partial(work, parameters, folder))
                processes.wait_all(_PATIENCE_S)
            found |= json.loads((folder / f"{work.__name__}0.json").read_text())
        files = [file for file in folder.rglob("*") if file.suffix == ".distcp"]
        found["files"] = len(files) / len({file.parent for file in files})
        return found


def _saves(parameters: int, folder: Path, rank: int) -> None:
    """One rank: begins, saves twice, fails, and continues from the survivors."""
    found = _Times()

    def body(call: inprocess.CallWrapper) -> None:
        dist.init_process_group("gloo")
        training = _Training(parameters)
        with training.job(folder) as job:
            dist.barrier()
            if call.iteration > 0:
                found.time("`restore()` from survivors", job.restore)
                found.time("the next save", job.save)
                return
            found.time("`restore()` that finds nothing", job.restore)
            training.step(job)
            found.time("first save with moments", job.save).wait()
            training.step(job)
            settle()
            handle = found.time("second save", job.save)
            found.time("until that is durable", handle.wait)
            dist.barrier()
            raise RuntimeError("a fault")

    body.__annotations__ = {"call": inprocess.CallWrapper}
    wrapped(body, inprocess.Wrapper())()
    (folder / f"_saves{rank}.json").write_text(json.dumps(found.rows))


def _restores(parameters: int, folder: Path, rank: int) -> None:
    """One rank of new processes: restores from disk; then the limits, on rank 0."""
    dist.init_process_group("gloo")
    training, found = _Training(parameters), _Times()
    model, optimizer, path = training.model, training.optimizer, folder / "plain"
    with training.job(folder) as job:
        dist.barrier()
        found.time("`restore()` from disk", job.restore)
        if job.restored_from != "storage":
            raise RuntimeError(f"restored from {job.restored_from!r}")
    dist.barrier()
    if rank == 0:
        tensors = [t for s in optimizer.state.values() for t in s.values()]
        tensors += model.state_dict().values()
        state: list[Any] = [model.state_dict(), optimizer.state_dict()]
        found.rows["tensors"] = len(tensors)
        found.time("limit: `clone()` of each", lambda: [t.clone() for t in tensors])
        found.time("limit: `torch.save`", lambda: torch.save(state, path))
        found.time(LOADS[0], lambda: torch.load(path))
        found.time(LOADS[1], lambda: model.load_state_dict(state[0]))
        load = partial(optimizer.load_state_dict, state[1])
        found.time(LOADS[2], load)
        settle()
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        plain = Writing(folder, size_bytes, 1).time(direct=False)
        found.rows["limit: a plain write of the bytes with fsync"] = [plain]
        settle()
        commit = partial(_plain_commit, folder, bytes(size_bytes))
        found.time("limit: the same, with the files and the order of a commit", commit)
    (folder / f"_restores{rank}.json").write_text(json.dumps(found.rows))
    dist.destroy_process_group()


def _plain_commit(folder: Path, content: bytes) -> None:
    """Writes a file of tensors, then two that tell of it, and renames their folder, each durably:
    without this order, a power failure could leave a checkpoint that looks complete.
    """
    working, final = folder / "working", folder / "final"
    working.mkdir()
    for names in (("tensors",), ("metadata", "manifest")):
        for name in names:
            with open(working / name, "wb") as file:
                file.write(content if name == "tensors" else content[: len(content) // 4])
                file.flush()
                os.fsync(file.fileno())
        fsync_folder(working)
    working.rename(final)
    fsync_folder(folder)


class _Training:
    def __init__(self, parameters: int) -> None:
        torch.manual_seed(0)
        torch.set_flush_denormal(True)  # what is left of a value after thousands of layers
        self.model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(parameters // 2)))
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)

    def job(self, path: Path) -> outlast.Job:
        return outlast.Job(path / "c", model=self.model, optimizer=self.optimizer, every=None)

    def step(self, job: outlast.Job) -> None:
        self.ddp(torch.randn(4, _WIDTH)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        job.step()


class _Times:
    """Of calls on the training thread: seconds, its processor time, and the garbage collector's."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {}
        self._collected = self._began = 0.0
        gc.callbacks.append(self._collects)

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        self._collected = 0.0
        began, used = time.perf_counter(), time.thread_time()
        result = work()
        spent = time.perf_counter() - began, time.thread_time() - used
        self.rows[name] = [*spent, self._collected]
        return result

    def _collects(self, phase: str, _: dict[str, Any]) -> None:
        if threading.current_thread() is threading.main_thread():
            now = time.thread_time()
            self._collected += now - self._began if phase == "stop" else 0.0
            self._began = now


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """A table for each number of parameters."""
    found = []
    for parameters, each in data.items():
        times = {name: values for name, values in each.items() if isinstance(values, list)}
        rows = [(name, *map(ms, [*spent, None, None][:3])) for name, spent in times.items()]
        title = f"{int(parameters):,} parameters: {each['tensors']:,} tensors (ms)"
        note = f"Rank 0. A checkpoint has {each['files']:g} files of tensors and values."
        found.append(Sheet(title, ("", "wall", "training thread", "of that, gc"), rows, note))
    return found
