"""A plain PyTorch script: gloo with `env://`, a second group, objects."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
total = torch.ones(1) * rank
dist.all_reduce(total)
objects: list[object] = [None] * size
dist.all_gather_object(objects, {"rank": rank})
group = dist.new_group(list(range(size)))
dist.barrier(group=group)
store = dist.distributed_c10d._get_default_store()
store.add("seen", 1)
print(f'{{"total": {total.item()}, "objects": {len(objects)}}}', flush=True)
dist.destroy_process_group()
os._exit(0)
