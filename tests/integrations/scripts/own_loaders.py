"""A program with a loader of torch or torchdata: `outlast run own_loaders.py PLAN`.

Its point `step N` is in front of step N. It tells the epoch and the samples of each step.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from planned_faults import PlannedFaults, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torch.utils.data import get_worker_info as worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import outlast
from outlast import inprocess

PLAN = json.loads(sys.argv[1])
KIND = PLAN["kind"]
EPOCHS, SAMPLES, GLOBAL_BATCH = 3, 48, 12
reach = PlannedFaults(PLAN, {}).reach


class Numbers(Dataset[torch.Tensor]):
    """Each number with noise, which the loader's workers draw if torch does not seed them once."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = 0.0 if KIND == "stateful" else torch.rand(1).item()
        return torch.tensor([index, noise])


class Stream(IterableDataset[torch.Tensor]):
    """This rank's numbers, in a random order that each worker draws for its own."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = worker_info()
        parts, part = (worker.num_workers, worker.id) if worker else (1, 0)
        first, each = dist.get_rank() * parts + part, dist.get_world_size() * parts
        mine = torch.arange(first, SAMPLES, each)
        for number in mine[torch.randperm(len(mine))]:
            yield torch.stack([number, torch.rand(())])


def make_loader() -> Any:
    data, batch = Numbers(), GLOBAL_BATCH // dist.get_world_size()
    if KIND == "stateful":
        sampler = StatefulDistributedSampler(data, seed=5)
        return StatefulDataLoader(data, batch, sampler=sampler, num_workers=2)
    if KIND.startswith("stream"):
        workers = 0 if KIND == "stream" else 2
        return DataLoader(
            Stream(), batch, num_workers=workers, persistent_workers=KIND == "stream kept"
        )
    return DataLoader(
        data, batch, sampler=DistributedSampler(data), num_workers=2, persistent_workers=True
    )


outside: list[Any] = []  # a loader that a program makes once, for all iterations


@inprocess.Wrapper()
def main(call: inprocess.CallWrapper) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    loader = outside[0] if outside else make_loader()
    if KIND == "outside" and not outside:
        outside.append(loader)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    states = {"model": model, "optimizer": optimizer, "every": PLAN.get("every", 100)}
    with outlast.Job(PLAN["path"], loader=loader if KIND == "stateful" else None, **states) as job:
        job.restore()
        say("restored", step=job.steps, source=job.restored_from)
        for epoch in job.epochs(EPOCHS):
            if KIND == "stateful":
                loader.sampler.set_epoch(epoch)
            for batch in job.batches(loader):
                call.ping()
                step = job.steps + 1
                reach(f"step {step}", call.iteration)
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                ids = [int(number) for number in batch[:, 0]]
                say("computed", name=f"step {step}", value=[epoch, ids, loss.item().hex()])
                job.step()
    weights = sum(p.double().sum().item() for p in model.parameters()).hex()
    say("computed", name="weights", value=weights)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
