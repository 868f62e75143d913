"""An all-reduce of this host with a neighbor, which makes the same check.

Hosts with accelerators have a rank for each, as a training has: each may have a network device of
its own. The first rank is this process, the others are helpers, which run this module. What is
summed are 32-bit integers in 64 bits: the sum is exact in any order, and every element is compared.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from outlast.launch.config.health_spec import Neighbor
from outlast.system import devices as accelerators
from outlast.system.units import size_text

_ELEMENTS = 1 << 23
_REPEATS = 4
_RIGHT = "right"


def check(neighbor: Neighbor) -> str:
    """Returns the speed, in words; a `RuntimeError` says what is wrong."""
    store, kind = _store(neighbor), _kind(neighbor.devices)
    theirs = _exchanged(store, "kind", neighbor.side, kind)
    if theirs != kind:
        raise RuntimeError(f"this host has {kind}, and {neighbor.name} has {theirs}")
    helpers = [_helper(neighbor, kind, rank) for rank in range(1, _count(kind))]
    speed, wrong = _sums(store, neighbor, kind)
    for helper in helpers:
        with open(helper, encoding="utf-8") as pipe:
            # A helper may wait in vain for a rank in which something is wrong.
            told = _RIGHT if wrong else pipe.readline().strip()
        wrong = wrong or ("" if told == _RIGHT else told or "the process of a device has ended")
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
        timeout=_timeout(neighbor),
    )
    return PrefixStore(neighbor.key, store)


def _timeout(neighbor: Neighbor) -> datetime.timedelta:
    """Longer than the launcher's limit, which says what has not ended."""
    return datetime.timedelta(seconds=2 * neighbor.limit_s)


def _kind(devices: bool) -> str:
    """The device of the ranks, and how many there are."""
    found = accelerators.available() if devices else None
    return "cpu:1" if found is None else f"{found.type}:{torch.accelerator.device_count()}"


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


def _helper(neighbor: Neighbor, kind: str, rank: int) -> int:
    """Starts the process of another device, which ends with the process group of this one; returns
    the descriptor of a pipe for what is wrong.
    """
    read, write = os.pipe()
    one = dataclasses.replace(neighbor, kind=kind, rank=rank, fd=write)
    command = [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(one))]
    subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[write])
    os.close(write)
    return read


def _help(neighbor: Neighbor) -> None:
    wrong = _sums(_store(neighbor), neighbor, neighbor.kind)[1]
    os.write(neighbor.fd, f"{wrong or _RIGHT}\n".encode())
    signal.pause()  # its connections are needed until the group is killed


def _sums(store: Store, neighbor: Neighbor, kind: str) -> tuple[str, str]:
    """The speed of all-reduces, and what is wrong, on this rank."""
    name, count = kind.partition(":")[0], _count(kind)
    rank, size = neighbor.side * count + neighbor.rank, 2 * count
    device = name if name == "cpu" else f"{name}:{neighbor.rank}"
    right = torch.zeros(_ELEMENTS, dtype=torch.long)
    for each in range(size):
        right += _numbers(each)
    began, wrong = 0.0, 0
    try:
        if name != "cpu":
            torch.get_device_module(name).set_device(neighbor.rank)
        dist.init_process_group(
            dist.get_default_backend_for_device(name),
            store=store,
            rank=rank,
            world_size=size,
            timeout=_timeout(neighbor),
        )
        right, own = right.to(device), _numbers(rank).to(device)
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


if __name__ == "__main__":
    _help(Neighbor(**json.loads(sys.argv[1])))
