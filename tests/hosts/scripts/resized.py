"""A training whose number of ranks changes: `resized.py --kind ddp|fsdp2|stream`, with the options
of the example. Rank 0 prints a hash of weights and moments after each step and restore.
"""

from __future__ import annotations

import argparse
import hashlib
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import outlast
from outlast import inprocess
from outlast.elastic import ElasticLoader, ShardedStream
from outlast.elastic.stop_agreement import StopAgreement

LENGTH = 96 * 120
TORN = 6
"""Rank 0 completes this step once it has heard of new ranks."""
ASKED: list[str] = []
_request = StopAgreement.request


def request(agreement: StopAgreement, reason: str, leave: Any = None) -> None:
    _request(agreement, reason, leave)
    if leave is not None:
        ASKED.append(reason)


StopAgreement.request = request  # type: ignore[method-assign]


def data(kind: str) -> Any:
    inputs = torch.randn(LENGTH, 16, generator=torch.Generator().manual_seed(0))
    if kind == "stream":
        shards = [str(number) for number in range(24)]
        size = LENGTH // len(shards)
        return ShardedStream(
            shards,
            lambda shard, offset: iter(
                inputs[int(shard) * size + offset : (int(shard) + 1) * size]
            ),
            batch_size=4,
        )
    return ElasticLoader(TensorDataset(inputs), global_batch_size=12)


def say(step: int, model: nn.Module, optimizer: torch.optim.Optimizer, source: str) -> None:
    tensors = [*model.state_dict().values()]
    for parameter in model.parameters():
        tensors += [optimizer.state[parameter][n] for n in ("exp_avg", "exp_avg_sq", "step")]
    found = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(whole.detach().numpy().tobytes())
    if dist.get_rank() == 0:
        print(f"{source} {step} {found.hexdigest()[:16]}", flush=True)


@inprocess.Wrapper()
def train(options: argparse.Namespace, call: inprocess.CallWrapper | None = None) -> None:
    assert call is not None
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    # Neither dimension can be divided by two or by three: the shards differ in size.
    model = nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 1))
    called: Any = model
    if options.kind == "fsdp2":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    else:
        called = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = data(options.kind)
    with outlast.Job(
        options.state, model=model, optimizer=optimizer, loader=loader, every=1000, min_ranks=1
    ) as job:
        if job.restore():
            say(job.steps, model, optimizer, f"restored from {job.restored_from} at")
        for _ in job.epochs(1):
            for batch in job.batches(loader):
                inputs = batch if options.kind == "stream" else batch[0]
                call.ping()
                loss = nn.functional.mse_loss(called(inputs), inputs.sum(1, keepdim=True))
                if options.kind != "stream":
                    loss = loss * loader.weight
                loss.backward()
                optimizer.step()
                # Others may have completed the step when rank 0, here, hears of the new ranks.
                if call.iteration == 0 and dist.get_rank() == 0 and job.steps + 1 == TORN:
                    while not ASKED:
                        call.ping()
                        time.sleep(0.02)
                job.step()
                optimizer.zero_grad()
                say(job.steps, model, optimizer, "after")
                example.record(options, call, job.steps)
                time.sleep(options.pause)
                if job.steps >= TORN + 20:
                    job.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--hold-at", type=int)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--go", type=Path)
    options = parser.parse_args()
    options.started = time.monotonic_ns()
    torch.set_num_threads(1)
    train(options)
