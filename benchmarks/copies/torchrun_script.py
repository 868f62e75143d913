"""The training of `host_loss` under torchrun: saves once, and restores after a restart."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.checkpoint.training_state import Size, Training


def main() -> None:
    folder = Path(sys.argv[1])
    size = Size(*map(int, sys.argv[2:6]))
    rank = int(os.environ["RANK"])

    def say(event: str, **fields: float) -> None:
        line = json.dumps({"event": event, "slot": rank, "pid": os.getpid(), **fields}) + "\n"
        with (folder / "said.log").open("ab", buffering=0) as log:
            log.write(line.encode())

    # On keys of its own in each attempt: with the default, a restarted rank 0 was seen to connect
    # to the address of a rank of the attempt before, and torchrun to give up.
    kinds: Any = dist
    agent = kinds.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = kinds.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], agent)
    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    job = Training(size, init_device_mesh("cpu", (dist.get_world_size(),)))
    checkpoint = folder / "checkpoint"
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        save(job.state_dict(), checkpoint_id=checkpoint)
        dist.barrier()
        say("ready")
        while True:
            job.train()
            dist.barrier()
    load(job.state_dict(), checkpoint_id=checkpoint)
    job.train()
    say("useful", at=time.monotonic())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
