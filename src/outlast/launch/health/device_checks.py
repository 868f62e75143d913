"""The checks of the accelerators of this host, or of the CPU if there is none; they need torch.

A product of matrices is compared with its exact value. Their elements are small integers, so that
every sum on the way is exact in the format of the product, in any order of the additions: no
tolerance is needed, and no other host. The value is not computed by the same units: for a random
vector v, (A B) v must be equal to A (B v), which the CPU computes in 64-bit integers. A wrong
product passes only if all of its errors are orthogonal to v.

An all-reduce with a neighbor, which makes the same check: hosts with accelerators have a rank for
each, as a training has, since each may have a network device of its own. The first rank is this
process, the others are helpers, which run this module. What is summed are 32-bit integers in 64
bits: the sum is exact in any order, and every element is compared.
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

from outlast.launch.config.job_spec import Neighbor
from outlast.system import devices as accelerators
from outlast.system.units import size_text

_SIZE, _CPU_SIZE = 2048, 512
_REPEATS, _CPU_REPEATS = 64, 4
_COPY_BYTES, _CPU_COPY_BYTES = 1 << 28, 1 << 26
_ELEMENTS, _SUMS = 1 << 23, 4
_RIGHT = "right"


def devices() -> list[str]:
    """The names of the devices that torch sees."""
    if not torch.accelerator.is_available():
        return ["cpu"]
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return [f"{kind.type}:{index}" for index in range(torch.accelerator.device_count())]


def check_device(name: str) -> str:
    """Multiplies and copies on a device, and compares; a `RuntimeError` names what is wrong."""
    cpu = name == "cpu"
    check_products(name, torch.float32, _CPU_SIZE if cpu else _SIZE, largest=8)
    if not cpu:
        # In bfloat16, with its own units, integers are exact up to 256.
        check_products(name, torch.bfloat16, 256, largest=1)
    return f"{name}: products exact, {_copied(name, _CPU_COPY_BYTES if cpu else _COPY_BYTES)}"


def check_products(name: str, dtype: torch.dtype, inner: int, largest: int) -> None:
    """Compares the product of matrices with elements up to `largest` with its exact value, and with
    itself when it is repeated.
    """
    size, repeats = (_CPU_SIZE, _CPU_REPEATS) if name == "cpu" else (_SIZE, _REPEATS)
    generator = torch.Generator().manual_seed(1)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-largest, largest + 1, shape, generator=generator)

    a, b, v = integers(size, inner), integers(inner, size), integers(size)
    on_device = a.to(name, dtype), b.to(name, dtype)
    first = on_device[0] @ on_device[1]
    if not torch.equal(first.cpu().long() @ v, a @ (b @ v)):
        raise RuntimeError(f"a product of matrices of {dtype} is wrong: the device is faulty")
    # On the device, with one wait at the end: this keeps it busy.
    wrong = torch.zeros((), dtype=torch.long, device=name)
    for _ in range(repeats):
        wrong += (on_device[0] @ on_device[1] != first).sum()
    if count := int(wrong):
        raise RuntimeError(
            f"{count} elements of {repeats} equal products of {dtype} differ: the device is faulty"
        )


def _copied(name: str, size_bytes: int) -> str:
    source = torch.arange(size_bytes // 8, device=name)
    source.clone()  # the first allocation takes longer
    _wait(name)
    began = time.monotonic()
    copy = source.clone()
    _wait(name)
    seconds = time.monotonic() - began
    if not torch.equal(copy, source):
        raise RuntimeError("a copy of its memory differs from its source: the device is faulty")
    return f"memory copied at {size_text(int(size_bytes / max(seconds, 1e-9)))}/s"


def _wait(name: str) -> None:
    if name != "cpu":
        torch.accelerator.synchronize(torch.device(name))


def check_neighbor(neighbor: Neighbor) -> str:
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
        for number in range(1 + _SUMS):
            if number == 1:  # the first one makes the connections
                began = time.monotonic()
            data = own.clone()
            dist.all_reduce(data)
            wrong += int((data != right).sum())  # it also waits for a device
    except RuntimeError as e:
        return "", str(e)
    if wrong:  # only here: the others wait for this rank in each of them
        return "", f"{wrong} elements are wrong in {1 + _SUMS} sums of {_ELEMENTS}"
    seconds = (time.monotonic() - began) / _SUMS
    return f"{size_text(int(own.nbytes / seconds))}/s", ""


def _numbers(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-(2**31), 2**31, (_ELEMENTS,), generator=generator)


if __name__ == "__main__":
    _help(Neighbor(**json.loads(sys.argv[1])))
