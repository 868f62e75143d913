"""The training that a campaign disturbs: a small model with dropout, Adam, DDP and `outlast.Job`.

    outlast run --nproc-per-node 4 training.py --folder DIR --steps 200 --seed 7

Its result depends on the seed, the number of ranks and the number of steps alone. It notes the
exact loss of every step on every rank, and the SHA-256 of the final weights.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
import torch._dynamo  # otherwise the first step of an optimizer imports it, which takes long
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import outlast
from outlast import chaos, inprocess
from outlast.campaign.notes import END, ENTRY, STEP, notes_in
from outlast.elastic import ElasticLoader
from outlast.events.emitter import JsonlSink
from outlast.events.event import Note

SAMPLES = 1024
FEATURES, HIDDEN, CLASSES = 64, 512, 4  # the hidden layer is large enough that all ranks write it
GLOBAL_BATCH = 32
SAVE_EVERY = 5


def make_loader(seed: int) -> ElasticLoader:
    """The data: random samples."""
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randn(SAMPLES, FEATURES, generator=generator)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    return ElasticLoader(TensorDataset(samples, labels), global_batch_size=GLOBAL_BATCH, seed=seed)


def make_model(seed: int) -> nn.Module:
    """The model, with dropout: its masks come from each rank's own random generator."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN),
        nn.LayerNorm(HIDDEN),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(HIDDEN, CLASSES),
    )


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """The SHA-256 of the exact values."""
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return content.hexdigest()


def resources() -> dict[str, object]:
    """How many descriptors of each kind (a file's name, a socket, a pipe, ...) and how many threads
    this process has. What only the garbage collector holds does not count.
    """
    gc.collect()
    kinds = Counter(map(_kind_of_descriptor, os.listdir("/proc/self/fd")))
    return {"descriptors": dict(kinds), "threads": len(os.listdir("/proc/self/task"))}


def _kind_of_descriptor(descriptor: str) -> str:
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return "closed"  # that of the folder itself
    return target.partition(":[")[0] if target.startswith(("socket:", "pipe:")) else target


def join_group(kind: str) -> torch.device:
    """Makes the process group, and returns the device of this rank, of this kind. GPUs that ranks
    share need gloo: NCCL wants one for each.
    """
    if kind == "cpu":
        dist.init_process_group("gloo")
        return torch.device(kind)
    rank, count = int(os.environ["LOCAL_RANK"]), torch.get_device_module(kind).device_count()
    backend = dist.get_default_backend_for_device(kind)
    if backend == "nccl" and int(os.environ["LOCAL_WORLD_SIZE"]) > count:
        backend = "gloo"
    torch.accelerator.set_device_index(rank % count)
    dist.init_process_group(f"cpu:gloo,{kind}:{backend}")
    return torch.device(kind, rank % count)


@inprocess.Wrapper(
    soft_timeout=3,
    hard_timeout=5,
    ping_timeout=3,  # a planned fault is an endless loop of Python
    termination_grace_time=1,
    repeated_faults=None,
)
def train(
    options: argparse.Namespace, notes: JsonlSink, call: inprocess.CallWrapper | None = None
) -> None:
    """Trains to the last step, from the newest state."""
    assert call is not None
    rank = int(os.environ["RANK"])

    def note(name: str, **data: object) -> None:
        notes.write(Note(name=name, rank=rank, pid=os.getpid(), data=data))

    note(ENTRY, **resources())
    device = join_group(options.device)
    model = make_model(options.seed).to(device)
    torch.manual_seed(options.seed * 1000 + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = make_loader(options.seed)
    checkpoints = options.folder / "checkpoints"
    with outlast.Job(
        checkpoints, model=model, optimizer=optimizer, loader=loader, every=SAVE_EVERY, linger=10
    ) as job:
        job.restore()
        # Otherwise DDP rebuilds its buckets after the first pass, and then adds the gradients of
        # three or more ranks in another order.
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        while job.steps < options.steps:
            for samples, labels in loader:
                chaos.step(job.steps)
                call.ping()
                loss = nn.functional.cross_entropy(ddp(samples.to(device)), labels.to(device))
                (loader.weight * loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                note(STEP, step=job.steps + 1, loss=float(loss.item()).hex())
                with call.long_phase():  # a save waits for the one before it
                    job.step()
                time.sleep(options.pause)
                if job.steps >= options.steps:
                    break
        samples_seen = job.samples
    del ddp
    # Sorted: after a restore, the optimizer's entries may be in another order.
    states = [sorted(optimizer.state[p].items()) for p in model.parameters()]
    note(
        END,
        steps=job.steps,
        samples=samples_seen,
        weights=digest(model.state_dict().values()),
        optimizer=digest(value for state in states for _, value in state),
    )
    dist.destroy_process_group()


def main() -> None:
    """Parses the options, and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="notes and checkpoints")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two steps")
    parser.add_argument("--device", default="cpu", help="the type; each rank uses one of them")
    torch.set_num_threads(1)
    options = parser.parse_args()
    train(options, JsonlSink(notes_in(options.folder)))


if __name__ == "__main__":
    main()
