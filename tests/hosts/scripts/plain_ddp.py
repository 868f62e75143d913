"""A wrapped DDP training on several hosts, with random numbers of each rank; the options of
`examples/hosts/train.py`, and `--stop-at RANK:STEP:POINT`: there the rank writes a file, and stays.

The points of a step: `begin`, `exchanged` (the gradients of all ranks are summed), `stepped`.
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import outlast
from outlast import inprocess
from outlast.elastic import ElasticLoader
from outlast.inprocess import Compose
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks


@inprocess.Wrapper(rank_assignment=Compose(ShiftRanks(), AwaitReplacements(120)))
def train(options: argparse.Namespace, call: inprocess.CallWrapper | None = None) -> None:
    assert call is not None
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def reach(step: int, point: str) -> None:
        for stop in options.stop_at:
            if stop == f"{rank}:{step}:{point}" and not call.iteration:
                (options.trace.parent / f"stopped-{rank}").touch()
                time.sleep(1000)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 1))
    called = DistributedDataParallel(model)
    torch.manual_seed(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs = torch.randn(24 * 40, 8, generator=torch.Generator().manual_seed(0))
    loader = ElasticLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), global_batch_size=24)
    parts = {"model": called, "optimizer": optimizer, "loader": loader}
    with outlast.Job(options.state, **parts, every=1000) as job:
        first = job.restore()
        print(f"rank {rank}: from step {first} ({job.restored_from})", flush=True)
        for _ in job.epochs(2):
            for features, targets in job.batches(loader):
                call.ping()
                step = job.steps + 1
                reach(step, "begin")
                (loader.weight * nn.functional.mse_loss(called(features), targets)).backward()
                reach(step, "exchanged")
                optimizer.step()
                optimizer.zero_grad()
                reach(step, "stepped")
                job.step()
                record(options, call.iteration, step)
    tensors = [each.flatten().float() for each in model.parameters()]
    if rank == 0:
        content = torch.cat(tensors).detach().numpy().tobytes()
        print(f"weights {hashlib.sha256(content).hexdigest()[:16]}", flush=True)
    dist.destroy_process_group()


def record(options: argparse.Namespace, iteration: int, step: int) -> None:
    host = socket.gethostname()
    line = {"host": host, "pid": os.getpid(), "rank": dist.get_rank(), "step": step}
    line |= {"size": dist.get_world_size(), "iteration": iteration, "time": time.monotonic()}
    with (options.trace / f"{host}-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--stop-at", action="append", default=[])
    torch.set_num_threads(1)
    train(parser.parse_known_args()[0])
