"""Replicas on several hosts that restore from a storage with one bandwidth for all of them.

The hosts are names on this machine, and the bandwidth is made: each read of a file holds a lock for
as long as the storage would take. What each rank reads itself (as on one host) is compared with
what they read together.
"""

from __future__ import annotations

import fcntl
import functools
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint.saves import disk_folder, in_ranks
from benchmarks.lib.sheets import Sheet, ms
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.restore import verified_read

__all__ = ["run", "sheets"]

_BYTES_PER_S = 200e6
_MIB = 128


def run(quick: bool) -> dict[str, Any]:
    """Measures each number of replicas."""
    mib, rounds = (16, 1) if quick else (_MIB, 5)
    found = []
    for ranks in (2,) if quick else (2, 4, 8):
        for hosts in (1, ranks):
            print(f"shared-reads: {ranks} replicas on {hosts} hosts", flush=True)
            work = functools.partial(_restores, mib, rounds, ranks, hosts)
            each = in_ranks("shared-reads", ranks, work)
            seconds = [
                max(times) for times in zip(*(rank["seconds"] for rank in each), strict=True)
            ]
            read = sum(rank["read"] for rank in each) / rounds
            size = each[0]["size"]
            found.append(
                {"ranks": ranks, "hosts": hosts, "seconds": seconds, "read": read, "size": size}
            )
    return {"rows": found, "rate": _BYTES_PER_S}


def _restores(mib: int, rounds: int, ranks: int, hosts: int, rank: int) -> dict[str, Any]:
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks // hosts)}
    os.environ["OUTLAST_HOST"] = f"host{rank % hosts}"
    torch.manual_seed(0)
    state = {f"{n}": torch.randn(1 << 18) for n in range(mib)}
    with disk_folder() as folder:
        with Checkpointer(folder / "c") as checkpointer:
            checkpointer.save(1, state).wait()
        files = [each.stat().st_size for each in (folder / "c").rglob("*.distcp")]
        read, seconds = _limit(folder / "lock"), []
        for _ in range(rounds):
            with Checkpointer(folder / "c") as checkpointer:
                dist.barrier()
                began = time.perf_counter()
                if checkpointer.restore(state) != 1:
                    raise RuntimeError("the checkpoint was not found")
                seconds.append(time.perf_counter() - began)
                if checkpointer.restorer.restored_from != "storage":
                    raise RuntimeError(f"restored from {checkpointer.restorer.restored_from}")
        return {"seconds": seconds, "read": sum(read), "size": sum(files)}


def _limit(lock: Path) -> list[int]:
    """Makes each read of a file take its time of the one storage; returns the bytes that were."""
    module, read = vars(verified_read), list[int]()
    real = module["read_hashed"]

    def read_hashed(reader: Any, offset: int, sections: Any) -> tuple[int, str]:
        found: tuple[int, str] = real(reader, offset, sections)
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(found[0] / _BYTES_PER_S)
        read.append(found[0])
        return found

    module["read_hashed"] = read_hashed
    return read


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The table: what storage gave, and the time beside that of one read of all."""
    rows = []
    for row in data["rows"]:
        seconds = statistics.median(row["seconds"])
        rows.append(
            (
                f"{row['ranks']} replicas on {row['hosts']} hosts",
                f"{row['size'] / (1 << 20):.0f}",
                f"{row['read'] / row['size']:.2f}",
                ms(seconds),
                f"{seconds * data['rate'] / row['size']:.2f}",
            )
        )
    return [
        Sheet(
            f"Restores of replicas, from a storage of {data['rate'] / 1e6:.0f} MB/s for all",
            ("", "MiB", "read, by the size", "ms", "time, by one read of all"),
            rows,
            "Medians of the slowest rank. On one host each rank reads all. All ranks are on this "
            "machine, and share its processors.",
        )
    ]
