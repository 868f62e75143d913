"""A training that ends at the step that the file of `--go` has: with DDP, and the same bits at any
number of ranks, or with FSDP2. Each rank records the samples of its steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3] / "examples" / "hosts"))

import torch
import torch.distributed as dist
import train as example
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import outlast
from outlast import inprocess
from outlast.elastic import ConsistentDDP, ElasticLoader

LENGTH, BATCH, PARTS = 960, 24, 12


@inprocess.Wrapper()
def train(options: argparse.Namespace, call: inprocess.CallWrapper | None = None) -> None:
    assert call is not None
    dist.init_process_group("gloo")
    inputs = torch.randn(LENGTH, 16, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, torch.arange(LENGTH))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 1))
    sharded, called = os.environ.get("KIND") == "fsdp2", module
    if sharded:
        fully_shard(module)
        loader = ElasticLoader(data, global_batch_size=BATCH)
    else:
        called = ConsistentDDP(module, virtual_replicas=PARTS)
        loader = ElasticLoader(data, global_batch_size=BATCH, virtual_replicas=PARTS)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    parts: dict[str, Any] = {"model": called, "optimizer": optimizer, "loader": loader}
    with outlast.Job(options.state, **parts, every=1000, min_ranks=1) as job:
        job.restore()
        run(options, call, job, called, optimizer, loader)
    tensors = [t.full_tensor() if isinstance(t, DTensor) else t for t in module.parameters()]
    weights = torch.cat([tensor.detach().flatten() for tensor in tensors])
    if dist.get_rank() == 0:
        print(f"weights {hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


def run(
    options: argparse.Namespace, call: Any, job: Any, model: Any, optimizer: Any, loader: Any
) -> None:
    seen: list[int] = []
    for _ in job.epochs(100_000):
        for features, numbers in job.batches(loader):
            call.ping()
            seen += numbers.tolist()
            loss = nn.functional.mse_loss(model(features), features.sum(1, keepdim=True))
            if isinstance(model, ConsistentDDP):
                with model.part(loader):
                    loss.backward()
                if not loader.boundary:
                    continue
            else:
                (loss * loader.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            job.step()
            example.record(options, call, job.steps)
            line = {"step": job.steps, "rank": dist.get_rank(), "samples": seen}
            with (options.samples / f"{os.getpid()}-{options.started}").open("a") as file:
                file.write(json.dumps(line) + "\n")
            seen = []
            last = int(options.go.read_text()) if options.go.exists() else -1
            if job.steps == last:
                return
            time.sleep(0 if last >= 0 else options.pause)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--hold-at", type=int)
    parser.add_argument("--pause", type=float, default=0.1)
    parser.add_argument("--go", type=Path)
    options = parser.parse_args()
    options.started = time.monotonic_ns()
    options.samples = options.trace.parent / "samples"
    options.samples.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    train(options)
