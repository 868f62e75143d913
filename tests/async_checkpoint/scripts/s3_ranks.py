"""Two ranks save to `sys.argv[1]` and restore from there."""

from __future__ import annotations

import json
import sys

import torch

from outlast import Checkpointer

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()


def state(value: float) -> dict[str, torch.Tensor]:
    return {f"of rank {rank}": torch.full((1000,), value + rank), "common": torch.ones(5) * value}


with Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(5, state(5.0)).wait()
with Checkpointer(sys.argv[1]) as checkpointer:
    loaded = state(0.0)
    step = checkpointer.restore(loaded)
same = all(torch.equal(loaded[name], tensor) for name, tensor in state(5.0).items())
print(json.dumps({"event": "restored", "step": step, "same": same}), flush=True)
torch.distributed.destroy_process_group()
