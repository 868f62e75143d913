"""A small deterministic training run for several hosts: its weights tell whether a fault showed.

    outlast run --nnodes 3 --rdzv-endpoint h1:29400,h2:29400,h3:29400 train.py --state STATE

It ends with the same bits at any number of ranks, and after any faults, and prints their hash.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import outlast
from outlast import inprocess
from outlast.elastic import ConsistentDDP, ElasticLoader

BATCH, STEPS_AN_EPOCH, EPOCHS = 24, 40, 3
PARTS = 12  # of every batch: the sum of their gradients has the same order at any number of ranks


@inprocess.Wrapper()
def train(options: argparse.Namespace, call: inprocess.CallWrapper | None = None) -> None:
    """Trains from the last checkpoint to the end, and prints a hash of the weights."""
    assert call is not None
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(BATCH * STEPS_AN_EPOCH, 16, generator=generator)
    data = TensorDataset(inputs, (inputs[:, :4].sum(1) > 0).long())

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    model = ConsistentDDP(module, virtual_replicas=PARTS)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    loader = ElasticLoader(data, global_batch_size=BATCH, virtual_replicas=PARTS)
    with outlast.Job(
        options.state,
        model=model,
        optimizer=optimizer,
        loader=loader,
        every=10,
        min_ranks=1,
        replicas=options.replicas,
        live=False if options.no_live else "auto",
    ) as job:
        first = job.restore() or 0
        if rank == 0:
            print(f"iteration {call.iteration}: {world_size} ranks from step {first}", flush=True)
        for _ in job.epochs(EPOCHS):
            for features, labels in job.batches(loader):
                call.ping()
                with model.part(loader):
                    nn.functional.cross_entropy(model(features), labels).backward()
                if not loader.boundary:
                    continue
                optimizer.step()
                job.step()
                record(options, call, job.steps)
                time.sleep(0 if options.go.exists() else options.pause)
                while rank == 0 and job.steps == options.hold_at and not options.go.exists():
                    call.ping()
                    time.sleep(0.02)
    weights = torch.cat([tensor.flatten() for tensor in module.state_dict().values()])
    if rank == 0:
        print(f"weights {hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


def record(options: argparse.Namespace, call: inprocess.CallWrapper, step: int) -> None:
    """Writes which step this process made, as which rank, and when."""
    if options.trace is None:
        return
    line = {
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "iteration": call.iteration,
        "step": step,
        "time": time.monotonic(),
    }
    host = socket.gethostname()
    with (options.trace / f"{host}-{os.getpid()}-{options.started}.jsonl").open("a") as file:
        file.write(json.dumps({"host": host, "pid": os.getpid(), **line}) + "\n")


def main() -> None:
    """Parses the options, and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two steps")
    parser.add_argument("--replicas", type=int, default=0, help="copies in other hosts' memory")
    parser.add_argument(
        "--no-live", action="store_true", help="after a fault, use checkpoints only"
    )
    parser.add_argument("--trace", type=Path, help="folder for a record of every step")
    parser.add_argument("--hold-at", type=int, help="step at which to wait for the file of --go")
    parser.add_argument(
        "--go", type=Path, default=Path("go"), help="a file that ends all waits and pauses"
    )
    options = parser.parse_args()
    options.started = time.monotonic_ns()
    torch.set_num_threads(1)
    train(options)


if __name__ == "__main__":
    main()
