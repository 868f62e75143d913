"""An all-reduce of this host with a neighbor, which runs the same; a program.

    python -m outlast.launch.health.neighbor_check SPECIFICATION

SPECIFICATION is a `Neighbor` as JSON. Hosts with accelerators have a rank for each, as a training
has: each may have a network device of its own. The first rank is this process, the others are
helpers. What is summed are 32-bit integers in 64 bits: the sum is exact in any order, and every
element is compared.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from outlast.launch.config.health_spec import Neighbor
from outlast.launch.health.checks import Checks, report_all
from outlast.system.units import size_text

_ELEMENTS = 1 << 23
_REPEATS = 4
_RIGHT = "right"


def _check(neighbor: Neighbor) -> str:
    store, kind = _store(neighbor), _kind(neighbor.devices)
    theirs = _exchanged(store, "kind", neighbor.side, kind)
    if theirs != kind:
        raise RuntimeError(f"this host has {kind}, and {neighbor.name} has {theirs}")
    helpers = [_helper(neighbor, kind, rank) for rank in range(1, _count(kind))]
    speed, wrong = _sums(store, neighbor, kind)
    for helper in helpers:
        assert helper.stdout is not None
        told = helper.stdout.readline().strip() or "the helper of a device has ended"
        wrong = wrong or ("" if told == _RIGHT else told)
    # Each waits for what the other has found: the store and the connections end with a process.
    try:
        theirs = _exchanged(store, "found", neighbor.side, wrong)
    except RuntimeError as e:
        wrong = wrong or str(e)
    if wrong or theirs:
        raise RuntimeError(wrong or f"{neighbor.name} says: {theirs}")
    return f"all-reduce with {neighbor.name} at {speed} ({kind})"


def _store(neighbor: Neighbor) -> Store:
    serves = neighbor.side == 0 and neighbor.rank == 0
    store = TCPStore(
        neighbor.address,
        neighbor.port,
        is_master=serves,
        master_listen_fd=neighbor.fd if serves else None,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=neighbor.limit_s),
    )
    return PrefixStore(neighbor.key, store)


def _kind(devices: bool) -> str:
    """The device of the ranks, and how many there are."""
    device = torch.accelerator.current_accelerator() if devices else None
    return "cpu:1" if device is None else f"{device.type}:{torch.accelerator.device_count()}"


def _count(kind: str) -> int:
    return int(kind.partition(":")[2])


def _exchanged(store: Store, what: str, side: int, own: str) -> str:
    """What the other side has said. Side 0 ends last: it serves the store."""
    if side == 0:
        store.set(f"{what}/0", own)
        return str(store.get(f"{what}/1").decode())
    theirs = store.get(f"{what}/0").decode()
    store.set(f"{what}/1", own)
    return str(theirs)


def _helper(neighbor: Neighbor, kind: str, rank: int) -> subprocess.Popen[str]:
    """The process of another device; it ends with the process group of this one."""
    one = dataclasses.replace(neighbor, kind=kind, rank=rank)
    command = [sys.executable, "-m", __spec__.name, json.dumps(dataclasses.asdict(one))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _help(neighbor: Neighbor) -> None:
    print(_sums(_store(neighbor), neighbor, neighbor.kind)[1] or _RIGHT, flush=True)
    sys.stdin.read()


def _sums(store: Store, neighbor: Neighbor, kind: str) -> tuple[str, str]:
    """The speed of all-reduces, and what is wrong, on this rank."""
    name, count = kind.partition(":")[0], _count(kind)
    rank, size = neighbor.side * count + neighbor.rank, 2 * count
    device = name if name == "cpu" else f"{name}:{neighbor.rank}"
    parts = [_numbers(rank) for rank in range(size)]
    began, wrong = 0.0, 0
    try:
        if name != "cpu":
            torch.accelerator.set_device_index(neighbor.rank)
        dist.init_process_group(
            dist.get_default_backend_for_device(name),
            store=store,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=neighbor.limit_s),
        )
        right, own = sum(parts[1:], parts[0]).to(device), parts[rank].to(device)
        for number in range(1 + _REPEATS):
            if number == 1:  # the first one makes the connections
                began = time.monotonic()
            data = own.clone()
            dist.all_reduce(data)
            wrong += int((data != right).sum())  # it also waits for a device
    except RuntimeError as e:
        return "", str(e)
    if wrong:  # only here: the others wait for this rank in each of them
        return "", f"{wrong} elements are wrong in {1 + _REPEATS} sums of {_ELEMENTS}"
    seconds = (time.monotonic() - began) / _REPEATS
    return f"{size_text(int(own.nbytes / seconds))}/s", ""


def _numbers(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-(2**31), 2**31, (_ELEMENTS,), generator=generator)


def _main(specification: str) -> None:
    neighbor = Neighbor(**json.loads(specification))
    if neighbor.rank:
        _help(neighbor)
    else:
        checks: Checks = iter([(f"the all-reduce with {neighbor.name}", lambda: _check(neighbor))])
        report_all(checks)


if __name__ == "__main__":
    _main(sys.argv[1])
