"""One rank of a job that meets what users meet first: `first_day.py SCENARIO [OPTION]`, under
`outlast run`. The last rank fails in the first iteration; in the end, all say "trained".

On CUDA with NCCL, also several ranks on one GPU; with `DEVICE=late`, on the one of `tests/late`.
"""

from __future__ import annotations

import copy
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import outlast
from gpu.sharing import own_index
from outlast.async_checkpoint import Checkpointer
from outlast.inprocess import CallWrapper, Wrapper

KIND = os.environ.get("DEVICE", "cuda")
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
OPTION = sys.argv[2] if len(sys.argv) > 2 else ""
FULL = 0.85  # of the memory of a GPU, all ranks on it together
BACKEND = "nccl"
if KIND == "late":
    from late import device as late

    late.use()
    BACKEND = "cpu:gloo,late:lategloo"
COUNT = torch.accelerator.device_count()
DEVICE = torch.device(KIND, own_index())
dist.set_debug_level_from_env()  # torch has read it when it was imported, by the zygote
SHORT = datetime.timedelta(seconds=20)
LIMITS = {"soft_timeout": SHORT, "hard_timeout": SHORT * 1.5}


def raises() -> None:
    raise ValueError("planned")


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fault(call: CallWrapper, work: Callable[[], object], how: Callable[[], None] = raises) -> None:
    """In the first iteration the last rank fails, while the others are in `work`, which needs it;
    later on, all do `work`.
    """
    if call.iteration or os.environ["OUTLAST_REPLACEMENT"] != "0":
        work()
        torch.accelerator.synchronize()
        return
    if RANK == SIZE - 1:
        if SIZE > 1:
            call.state.store.wait(["waits"])
            time.sleep(1)  # they say so, and are in it a moment later
        how()
    call.state.store.set("waits", "1")
    work()
    torch.accelerator.synchronize()
    time.sleep(60)
    raise AssertionError("the rank was not interrupted")


def ones() -> torch.Tensor:
    return torch.ones(1024, device=DEVICE)


def group(**options: Any) -> None:
    torch.accelerator.set_device_index(DEVICE.index)
    dist.init_process_group(BACKEND, **options)


def check_sum(group: Any = None) -> None:
    x = ones()
    dist.all_reduce(x, group=group)
    assert x.sum().item() == 1024 * SIZE


def fill() -> torch.Tensor:
    """Takes most of the GPU, on `late` nothing."""
    ranks_here = len(range(RANK % COUNT, SIZE, COUNT))
    total = torch.cuda.mem_get_info()[1] if KIND == "cuda" else 0
    return torch.empty(int(total * FULL / ranks_here), dtype=torch.uint8, device=DEVICE)


def before_the_first_collective(call: CallWrapper) -> None:
    """While a communicator is made; OPTION `eager`: with the group."""
    if OPTION == "eager":
        fault(call, lambda: group(device_id=DEVICE))
    else:
        group()
        fault(call, lambda: dist.all_reduce(ones()))
    check_sum()


def in_a_collective(call: CallWrapper) -> None:
    """OPTION `kill`: the rank is killed; `finally`: it destroys its group first."""
    group()
    try:
        check_sum()
        fault(call, lambda: dist.all_reduce(ones()), is_killed if OPTION == "kill" else raises)
        check_sum()
    finally:
        if OPTION == "finally":
            dist.destroy_process_group()


def in_a_subgroup(call: CallWrapper) -> None:
    group()
    part = dist.new_group(list(range(SIZE)))
    check_sum(part)
    fault(call, lambda: dist.all_reduce(ones(), group=part))
    check_sum(part)


def in_a_split(call: CallWrapper) -> None:
    """A subgroup is made from the communicator of the default group."""
    group(device_id=DEVICE)
    check_sum()
    fault(call, lambda: dist.new_group(list(range(SIZE))))
    check_sum()


def between_pairs(call: CallWrapper) -> None:
    """The first rank receives what the last one never sends."""
    group()
    check_sum()
    x = torch.zeros_like(ones())

    def exchange() -> None:
        if RANK == SIZE - 1:
            dist.send(ones(), dst=0)
        elif RANK == 0:
            dist.recv(x, src=SIZE - 1)

    fault(call, exchange)
    assert RANK or x.sum().item() == 1024


def in_a_graph(call: CallWrapper) -> None:
    """A captured all-reduce is replayed."""
    group()
    check_sum()
    x, graph = ones(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x)
    graph.replay()
    torch.cuda.synchronize()
    assert x.sum().item() == 1024 * SIZE
    fault(call, graph.replay)
    check_sum()


def sharded(call: CallWrapper) -> None:
    """A model of FSDP2 on a mesh; the rank fails before its second step. In the end, its values are
    those of the same model in one piece.
    """
    group()
    torch.manual_seed(0)
    whole = nn.Sequential(*[nn.Linear(256, 256) for _ in range(2)])
    model = copy.deepcopy(whole).to(DEVICE)
    mesh = init_device_mesh(KIND, (SIZE,), mesh_dim_names=("s",))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def step(model: nn.Module = model, device: torch.device = DEVICE) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        model(torch.ones(4, 256, device=device)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    fault(call, step)
    for _ in range(2):
        step(whole, torch.device("cpu"))
    for part, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(part.full_tensor().cpu(), wanted, rtol=1e-3, atol=1e-5)


def in_symmetric_memory(call: CallWrapper) -> None:
    """All ranks meet for memory that they share, and again after the restart; OPTION `kill`: the
    rank is killed.
    """
    group()
    check_sum()

    def meet() -> None:
        memory = symmetric_memory.empty(1024, device=DEVICE)
        met = symmetric_memory.rendezvous(memory, dist.group.WORLD)
        assert (met.rank, met.world_size) == (RANK, SIZE)
        print("meets in pid", os.getpid(), flush=True)

    meet()
    fault(call, lambda: dist.all_reduce(ones()), is_killed if OPTION == "kill" else raises)
    meet()


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def with_workers(call: CallWrapper) -> None:
    """The rank is killed while workers of its `DataLoader` live, and its GPU is nearly full."""
    group()
    check_sum()
    full = fill()
    loader = DataLoader(Numbers(), num_workers=2, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    fault(call, lambda: dist.all_reduce(ones()), is_killed)
    next(batches)
    del full


NAMES = ("threads", "descriptors", "resident bytes", "bytes on the device")
MOST_MORE = (8, 10, 64 << 20, 64 << 20)  # less than one thread, descriptor or MB a restart
HELD: list[int] = []


def held() -> list[int]:
    own = psutil.Process()
    free, total = torch.get_device_module(KIND).mem_get_info()
    return [own.num_threads(), own.num_fds(), own.memory_info().rss, total - free]


def many_aborts(call: CallWrapper) -> None:
    """OPTION restarts, each with a collective queued. What they leave behind is said."""
    group()
    check_sum()
    most = int(OPTION)
    if call.iteration == most // 4:
        HELD.extend(held())
    if call.iteration < most:
        dist.all_reduce(ones(), async_op=True)
        raise ValueError(f"planned, in iteration {call.iteration}")

    def grown() -> list[str]:
        each = zip(NAMES, HELD, held(), MOST_MORE, strict=True)
        return [f"{name}: {old}, then {new}" for name, old, new, more in each if new - old > more]

    deadline = time.monotonic() + SHORT.total_seconds()
    while grown() and time.monotonic() < deadline:
        time.sleep(0.1)  # threads drop the last groups
    print("grown", grown(), flush=True)


def saves(call: CallWrapper) -> None:
    """OPTION is a folder. Says how many processes have a context on the first GPU, after an
    overlapped save, a drain and a restart, and how many ranks are on it.
    """
    group()
    model = nn.Linear(1024, 1024).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    with Checkpointer(OPTION, keep=1, overlap=optimizer) as checkpointer:
        handle = checkpointer.save(call.iteration, {"model": model.state_dict()})
        model(torch.ones(4, 1024, device=DEVICE)).square().mean().backward()
        optimizer.step()
        handle.wait(60)
        fault(call, lambda: dist.all_reduce(ones()))
        if RANK == 0 and KIND == "cuda":
            gpu = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"
            query = ["nvidia-smi", gpu, "--query-compute-apps=pid", "--format=csv,noheader"]
            found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
            print("contexts", len(found.split()), len(range(0, SIZE, COUNT)), flush=True)
        check_sum()


def resized(call: CallWrapper) -> None:
    """OPTION is a folder: five more steps of a sharded model with a `GradScaler`, at any number of
    ranks, while its GPU is nearly full.
    """
    group()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).to(DEVICE)
    fully_shard(model, mesh=init_device_mesh(KIND, (SIZE,)))
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler(KIND, init_scale=2.0**10)
    states = {"scaler": scaler}
    with outlast.Job(OPTION, model=model, optimizer=optimizer, states=states, every=None) as job:
        job.restore()
        full = fill()
        for _ in range(5):
            loss = model(torch.ones(4, 256, device=DEVICE)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            job.step()
        del full
        job.save()
        print("steps", job.steps, flush=True)


scenario: Callable[[CallWrapper], None] = globals()[sys.argv[1]]
limits: dict[str, Any] = dict(LIMITS)
if sys.argv[1] == "many_aborts":
    limits["repeated_faults"] = None


@Wrapper(**limits)
def train(call: CallWrapper) -> None:
    scenario(call)
    if dist.is_initialized():
        dist.destroy_process_group()
    print("trained", flush=True)


train()
