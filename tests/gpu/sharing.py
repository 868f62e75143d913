"""Several ranks of NCCL on one GPU."""

from __future__ import annotations

import os

import torch


def own_index() -> int:
    """The index of this rank's device. Where the ranks are more than the GPUs, NCCL is told that
    each is on a host of its own: it refuses two ranks of one host on one GPU, and goes by sockets
    here. To be called before NCCL is used.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    count = torch.accelerator.device_count()
    if count < size:
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_IB_DISABLE="1")
    return rank % count
