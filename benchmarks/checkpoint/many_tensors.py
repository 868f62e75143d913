"""A state of many small tensors: what a save and a restore do that is not copying bytes.

Two ranks with DDP, gloo and Adam: each parameter has three more tensors, its moments and its count
of steps. New processes restore the checkpoint; before that, the job has continued from its
survivors after an exception. Beside that are the limits, measured in the same processes.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
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

__all__ = ["run", "sheets"]

_RANKS, _WIDTH, _PATIENCE_S = 2, 16, 900.0
_PARAMETERS = (2_000, 10_000)


def run(quick: bool) -> dict[str, Any]:
    """Measures each number of parameters, with all layers in one `Sequential`."""
    return {str(n): _measure(n) for n in ((40,) if quick else _PARAMETERS)}


def _measure(parameters: int) -> dict[str, Any]:
    print(f"many-tensors: {parameters} parameters", flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.absolute(), prefix="many-") as name:
        found: dict[str, Any] = {}
        for work in (_saves, _restores):
            with RankProcesses("many-tensors", _RANKS) as processes:
                processes.start_all(lambda _, work=work: work(parameters, Path(name)))
                processes.wait_all(_PATIENCE_S)
            found |= json.loads((Path(name) / f"{work.__name__}.json").read_text())
        files = [file for file in Path(name).rglob("*") if file.suffix == ".distcp"]
        found["files"] = len(files) / len({file.parent for file in files})
        return found


def _saves(parameters: int, folder: Path) -> None:
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
            handle = found.time("first save with moments", job.save)
            found.time("until it is durable", handle.wait)
            training.step(job)
            settle()
            began = time.perf_counter()
            handle = found.time("second save", job.save)
            handle.wait()
            found.rows["second save, until it is durable"] = [time.perf_counter() - began]
            dist.barrier()
            raise RuntimeError("a fault")

    body.__annotations__ = {"call": inprocess.CallWrapper}
    wrapped(body, inprocess.Wrapper())()
    found.store(folder / f"{_saves.__name__}.json")


def _restores(parameters: int, folder: Path) -> None:
    """One rank of new processes: restores from disk; then the limits, on rank 0."""
    dist.init_process_group("gloo")
    training, found = _Training(parameters), _Times()
    with training.job(folder) as job:
        dist.barrier()
        found.time("`restore()` from disk", job.restore)
        if job.restored_from != "storage":
            raise RuntimeError(f"restored from {job.restored_from!r}")
    if dist.get_rank() == 0:
        _limits(training, folder / "plain", found)
    found.store(folder / f"{_restores.__name__}.json")
    dist.destroy_process_group()


def _limits(training: _Training, path: Path, found: _Times) -> None:
    model, optimizer, state = training.model, training.optimizer, training.state_dict()
    tensors = [t for s in optimizer.state.values() for t in s.values()]
    tensors += model.state_dict().values()
    found.rows["tensors"] = len(tensors)
    found.time("limit: `state_dict()`", training.state_dict)
    found.time("limit: `clone()` of each", lambda: [t.clone() for t in tensors])
    found.time("limit: `torch.save`", lambda: torch.save(state, path))
    found.time("limit: `torch.load`", lambda: torch.load(path))
    of_model = functools.partial(model.load_state_dict, state["model"])
    found.time("limit: `load_state_dict` of the model", of_model)
    of_optimizer = functools.partial(optimizer.load_state_dict, state["optimizer"])
    found.time("limit: `load_state_dict` of the optimizer", of_optimizer)
    settle()
    writing = Writing(path.parent, sum(tensor.nbytes for tensor in tensors), 1)
    found.rows["limit: a plain write with fsync"] = [writing.time(direct=False)]


class _Training:
    def __init__(self, parameters: int) -> None:
        torch.manual_seed(0)
        torch.set_flush_denormal(True)  # what is left of a value after thousands of layers
        layers: list[nn.Module] = [nn.Linear(_WIDTH, _WIDTH) for _ in range(parameters // 2)]
        self.model = nn.Sequential(*layers)
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5)
        self.inputs = torch.randn(4, _WIDTH)

    def job(self, folder: Path) -> outlast.Job:
        return outlast.Job(
            folder / "checkpoints", model=self.model, optimizer=self.optimizer, every=None
        )

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def step(self, job: outlast.Job) -> None:
        self.ddp(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        job.step()


class _Times:
    """Of calls on the training thread: seconds, its processor time, and the garbage collector's."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {}
        self._collected = self._began = 0.0

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        self._collected = 0.0
        gc.callbacks.append(self._collects)
        began, used = time.perf_counter(), time.thread_time()
        result = work()
        self.rows[name] = [time.perf_counter() - began, time.thread_time() - used]
        gc.callbacks.remove(self._collects)
        self.rows[name].append(self._collected)
        return result

    def _collects(self, phase: str, info: dict[str, Any]) -> None:
        if threading.current_thread() is threading.main_thread():
            now = time.thread_time()
            self._collected += now - self._began if phase == "stop" else 0.0
            self._began = now

    def store(self, file: Path) -> None:
        """The figures of rank 0."""
        if os.environ["RANK"] == "0":
            file.write_text(json.dumps(self.rows))


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """A table for each number of parameters."""
    found = []
    for parameters, each in data.items():
        rows = [
            (name, *(ms(seconds) for seconds in values), *["-"] * (3 - len(values)))
            for name, values in each.items()
            if isinstance(values, list)
        ]
        title = f"{int(parameters):,} parameters: {each['tensors']:,} tensors, 2 ranks, gloo (ms)"
        note = f"Rank 0. A checkpoint has {each['files']:g} files of tensors and values."
        found.append(Sheet(title, ("", "wall", "training thread", "of that, gc"), rows, note))
    return found
