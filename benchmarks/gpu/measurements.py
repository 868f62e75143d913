"""The measurements on a GPU, each in a process of its own, beside a physical limit that is measured
in the same process: `python -m benchmarks.gpu.measurements NAME` prints its figures as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import outlast
from benchmarks.gpu.results import Figure
from benchmarks.lib.machine import describe
from outlast.async_checkpoint import Checkpointer
from outlast.inprocess import CallWrapper, Wrapper

__all__ = ["MEASUREMENTS", "machine"]

_REPEATS = 7
_STATE_BYTES = 1 << 30
_WAIT_S = 60.0
_STEPS = 50


def machine() -> dict[str, str]:
    """This machine, its GPUs and the versions."""
    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(device) for device in range(count)}
    return {
        **describe(),
        "GPUs": f"{count}: {', '.join(sorted(names))}",
        "CUDA": str(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
    }


def blocked_by_an_eager_save() -> list[Figure]:
    """How long training waits for a save of 1 GiB, beside one copy of it to pinned memory."""
    state = {f"tensor {i}": torch.randn(_STATE_BYTES // 64, device="cuda") for i in range(16)}
    limit = _pinned_copy(list(state.values()))
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, keep=1) as checkpointer:
        times = []
        for step in range(_REPEATS + 1):
            torch.cuda.synchronize()
            began = time.perf_counter()
            handle = checkpointer.save(step, state)
            times.append(time.perf_counter() - began)
            handle.wait(_WAIT_S)
    return [
        Figure(
            "blocked by an eager save of 1 GiB (median)",
            "s",
            statistics.median(times[1:]),
            limit,
            "one copy of 1 GiB to pinned memory",
        )
    ]


def blocked_by_an_overlapped_save() -> list[Figure]:
    """How much longer a step takes when a save is copied during it, beside a step alone."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(8)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
    data = torch.randn(8192, 4096, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(4):
            model(data).square().mean().backward()
        optimizer.step()

    step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    alone = _median(step)
    calls, steps = [], []
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpointer(folder, keep=1, overlap=optimizer) as checkpointer,
    ):
        for number in range(_REPEATS + 1):
            torch.cuda.synchronize()
            began = time.perf_counter()
            handle = checkpointer.save(number, state)
            calls.append(time.perf_counter() - began)
            step()
            torch.cuda.synchronize()
            steps.append(time.perf_counter() - began)
            handle.wait(_WAIT_S)
    tensors = [p.data for p in model.parameters()]
    return [
        Figure("call of an overlapped save (median)", "s", statistics.median(calls[1:])),
        Figure(
            "step with an overlapped save of its 1 GiB state (median)",
            "s",
            statistics.median(steps[1:]),
            max(alone, 2 * _pinned_copy(tensors)),
            "the longer of the step alone, and the copy to pinned memory",
        ),
    ]


def restore_to_the_device() -> list[Figure]:
    """Restoring 1 GiB from memory into tensors on the GPU, beside one copy of it from pinned
    memory.
    """
    state = {f"tensor {i}": torch.randn(_STATE_BYTES // 64, device="cuda") for i in range(16)}
    limit = _pinned_copy(list(state.values()), to_device=True)
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state).wait(_WAIT_S)
        took = _median(lambda: checkpointer.restore(state))
    name = "restore of 1 GiB to the GPU (median)"
    return [Figure(name, "s", took, limit, "one copy of 1 GiB from pinned memory")]


def restart_with_nccl() -> list[Figure]:
    """An exception on the only rank of an NCCL group, until the first collective after it."""
    marks: list[tuple[float, float]] = []
    failed = [0.0]

    @Wrapper()
    def train(call: CallWrapper) -> None:
        dist.init_process_group("nccl")
        ready = time.perf_counter()
        numbers = torch.ones(1 << 20, device="cuda")
        dist.all_reduce(numbers)
        torch.cuda.synchronize()
        now = time.perf_counter()
        if failed[0]:
            marks.append((now - failed[0], now - ready))
        if call.iteration < _REPEATS:
            failed[0] = time.perf_counter()
            raise RuntimeError(f"planned, in iteration {call.iteration}")
        dist.destroy_process_group()

    train()
    return [
        Figure(
            "exception to the first NCCL collective after the restart (median)",
            "s",
            statistics.median(took for took, _ in marks),
            statistics.median(least for _, least in marks),
            "NCCL's creation of a communicator and the collective",
        )
    ]


def step_with_live_state() -> list[Figure]:
    """A step of a `Job` that can continue from it after a fault, beside one that cannot."""
    found: list[float] = []

    @Wrapper()
    def train(call: CallWrapper) -> None:
        dist.init_process_group("nccl")
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
        optimizer = torch.optim.Adam(model.parameters(), 1e-5, fused=True)
        data = torch.randn(1024, 1024, device="cuda")
        for live in (False, True):
            with (
                tempfile.TemporaryDirectory() as folder,
                outlast.Job(folder, model=model, optimizer=optimizer, every=None, live=live) as job,
            ):
                job.restore()

                def steps(job: outlast.Job = job) -> None:
                    for _ in range(_STEPS):
                        model(data).square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                        job.step()

                found.append(_median(steps) / _STEPS)
        dist.destroy_process_group()

    train()
    without, with_it = found
    name = "step of 8 layers with live state (median)"
    return [Figure(name, "s", with_it, without, "the same step without live state")]


MEASUREMENTS: tuple[Callable[[], list[Figure]], ...] = (
    restart_with_nccl,
    step_with_live_state,
    blocked_by_an_eager_save,
    blocked_by_an_overlapped_save,
    restore_to_the_device,
)


def _pinned_copy(tensors: list[torch.Tensor], *, to_device: bool = False) -> float:
    """Seconds for one copy of all of them between the GPU and pinned memory, the shortest."""
    hosts = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]

    def copy() -> None:
        for tensor, host in zip(tensors, hosts, strict=True):
            to, source = (tensor, host) if to_device else (host, tensor)
            to.copy_(source, non_blocking=True)

    for tensor, host in zip(tensors, hosts, strict=True):
        host.copy_(tensor)
    return min(_times(copy))


def _median(work: Callable[[], Any]) -> float:
    return statistics.median(_times(work))


def _times(work: Callable[[], Any]) -> list[float]:
    """Seconds that the work takes until the GPU has done it, after one run that is not counted."""
    times = []
    for _ in range(_REPEATS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return times[1:]


def _main() -> None:
    chosen = {each.__name__: each for each in MEASUREMENTS}[sys.argv[1]]
    print(json.dumps([dataclasses.asdict(figure) for figure in chosen()]))


if __name__ == "__main__":
    _main()
