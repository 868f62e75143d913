"""A `Trainer` class with a `DistributedSampler`, as DDP tutorials have it, that survives faults.

    outlast run --nproc-per-node 2 examples/ports/ddp_trainer.py

The class keeps its data loader and its sampler. A `Job` takes the place of the snapshot file, and
yields the batches that are left of an epoch.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import outlast
from outlast import inprocess


class Trainer:
    def __init__(
        self,
        model: nn.Module,
        train_data: DataLoader[tuple[torch.Tensor, ...]],
        optimizer: torch.optim.Optimizer,
        job: outlast.Job,
        call: inprocess.CallWrapper,
    ) -> None:
        self.train_data, self.optimizer, self.job, self.call = train_data, optimizer, job, call
        self.model = DDP(model)  # first: it gives all ranks the same initial weights
        job.restore()

    def _run_batch(self, source: torch.Tensor, targets: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        print(f"step {self.job.steps + 1}: loss {loss.item()!r}", flush=True)

    def _run_epoch(self) -> None:
        for source, targets in self.job.batches(self.train_data):
            self.call.ping()
            self._run_batch(source, targets)
            self.job.step()

    def train(self, max_epochs: int) -> None:
        for _ in self.job.epochs(max_epochs):
            self._run_epoch()


def load_train_objs() -> tuple[Dataset[tuple[torch.Tensor, ...]], nn.Module, torch.optim.Optimizer]:
    x = torch.randn(1024, 20, generator=torch.Generator().manual_seed(1))
    y = (x[:, :4].sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return TensorDataset(x, y), model, optimizer


def prepare_dataloader(
    dataset: Dataset[tuple[torch.Tensor, ...]], batch_size: int
) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset))


@inprocess.Wrapper()
def main(
    total_epochs: int,
    save_every: int,
    batch_size: int,
    snapshots: Path,
    call: inprocess.CallWrapper | None = None,
) -> None:
    assert call is not None
    dist.init_process_group("gloo")
    torch.manual_seed(int(os.environ["RANK"]))
    dataset, model, optimizer = load_train_objs()
    train_data = prepare_dataloader(dataset, batch_size)
    with outlast.Job(snapshots, model=model, optimizer=optimizer, every=save_every) as job:
        Trainer(model, train_data, optimizer, job, call).train(total_epochs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=10, help="steps between two snapshots")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--snapshots", type=Path, default=Path("snapshots"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    main(options.epochs, options.save_every, options.batch_size, options.snapshots)
