"""Whether accelerate has seen that there are other ranks."""

from __future__ import annotations

import torch.distributed as dist


def check_all_ranks(num_processes: int, on_cpus: str) -> None:
    """Checks that accelerate trains with all ranks of the process group.

    Without a GPU, it takes no notice of the other ranks unless it is told to use CPUs.

    Args:
        num_processes: as accelerate counts them.
        on_cpus: what tells it.

    Raises:
        ValueError: if each rank would train alone.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_processes < ranks:
        raise ValueError(
            f"accelerate uses {num_processes} of {ranks} ranks: each rank would train alone. "
            f"On CPUs, pass {on_cpus}"
        )
