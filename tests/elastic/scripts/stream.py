"""A rank that trains on a `ShardedStream`: `python stream.py PATH STEPS`.

It resumes from the state in the file PATH, if it exists. After STEPS steps it writes its state to
PATH and exits; with STEPS 0, at the end of the second epoch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outlast.elastic import ShardedStream

LENGTHS = [7, 0, 11, 3, 5, 9, 1]  # of the shards: unequal, and one is empty
EPOCHS = 2


def say(event: str, **fields: Any) -> None:
    """Prints an event as one line, in one write."""
    os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


def read(shard: str, offset: int) -> Iterator[int]:
    """The items of a shard: consecutive numbers over all shards."""
    number = int(shard)
    begin = sum(LENGTHS[:number])
    return iter(range(begin + offset, begin + LENGTHS[number]))


def main(path: Path, steps: int) -> None:
    dist.init_process_group("gloo")
    stream = ShardedStream([str(i) for i in range(len(LENGTHS))], read, batch_size=2)
    if path.exists():
        stream.load_state_dict(json.loads(path.read_text()))
    say("loaded", state=stream.state_dict())
    done = 0
    while stream.epoch < EPOCHS and (not steps or done < steps):
        epoch = stream.epoch
        for batch in stream:
            # As DDP averages the means of the batches over the ranks.
            mean = batch.double().mean() * stream.weight
            dist.all_reduce(mean)
            items = batch.tolist() if stream.weight > 0 else []
            say("trained", epoch=epoch, items=items, mean=float(mean) / dist.get_world_size())
            done += 1
            if done == steps:
                break
    state = stream.state_dict()
    say("left", state=state, trained=stream.trained)
    dist.barrier()  # all ranks have read the file
    if dist.get_rank() == 0:
        path.write_text(json.dumps(state))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
