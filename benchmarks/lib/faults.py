"""The faulty training function that all wrappers run, and the state of the other ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.lib.timestamp_board import TimestampBoard

__all__ = ["KINDS", "RANKS", "body", "part"]

RANKS = 4
SETTLE_S = 0.05
"""How long the failing rank waits for the other ranks to reach their blocking calls."""

KINDS = {
    "exception": "a rank raises, the others are in an all_reduce that it does not join",
    "sigkill": "a rank is killed, the others are in an all_reduce that it does not join",
    "hang_world": "a rank raises while the others hang in collectives of the world group",
    "hang_subgroup": "a rank raises while the others hang, two of them in a sub-group",
    "sleep": "a rank raises while the others are in time.sleep(3600)",
}


def part() -> None:
    """Ends the process group after a barrier: a rank that closes its connections while another is
    still in the last collective would cause an unplanned fault.
    """
    dist.barrier()
    time.sleep(SETTLE_S)
    dist.destroy_process_group()


def body(
    board: TimestampBoard,
    slot: int,
    iteration: int,
    kind: str,
    faults: int,
    join_group: Callable[[], None],
    first: int = 0,
) -> None:
    """One iteration: joins the group, works and fails, until there were `faults` faults. The ranks
    fail in turn, starting with rank `first`.
    """
    board.enter(iteration, slot, time.monotonic())
    trial = board.faults
    join_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    data = torch.ones(1 << 18)
    # Created for every kind, even where it is unused, so that all kinds cost the same.
    victim = (first + trial) % size
    others = [r for r in range(size) if r != victim]
    subgroup = dist.new_group(others)
    for _ in range(3):
        dist.all_reduce(data)
    if size < board.slots:
        while True:  # until the replacement of the killed rank joins
            time.sleep(0.01)
            dist.all_reduce(data)
    if trial >= faults:
        part()
        return
    if rank == victim:
        time.sleep(SETTLE_S)
        board.fail(iteration, slot)
        if kind == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"planned fault {trial}")
    apart = rank == others[0]
    if kind == "sleep":
        time.sleep(3600)
    elif kind == "hang_world" and apart:
        dist.recv(data, src=others[-1])  # that no rank sends
    elif kind == "hang_subgroup" and not apart:
        dist.all_reduce(data, group=subgroup)  # that the rank `apart` does not join
    dist.all_reduce(data)
    raise AssertionError("a collective ended that not all ranks had joined")
