"""A training loop with accelerate, on two ranks, that survives faults.

    outlast run --nproc-per-node 2 examples/ports/accelerate_loop.py

`outlast.integrations.accelerate.make_job` saves and restores what the `Accelerator` has prepared.
The data are synthetic.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from outlast import chaos, inprocess
from outlast.elastic import ElasticLoader
from outlast.integrations.accelerate import make_job, reset_state


@inprocess.Wrapper()
def main(path: Path, epochs: int, call: inprocess.CallWrapper | None = None) -> None:
    assert call is not None
    reset_state()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    x = torch.randn(1024, 20)
    loader = ElasticLoader(TensorDataset(x, (x[:, :4].sum(1) > 0).long()), global_batch_size=64)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, gamma=0.7)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    with make_job(accelerator, path, loader=loader, every=10) as job:
        accelerator.load_state()
        for _ in job.epochs(epochs):
            for inputs, labels in job.batches(loader):
                call.ping()
                chaos.step(job.steps)  # so that a fault plan can name a step
                loss = F.cross_entropy(model(inputs), labels)
                print(f"step {job.steps + 1}: loss {loss.item()!r}", flush=True)
                accelerator.backward(loader.weight * loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                job.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", type=Path, default=Path("accelerate"))
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    main(options.path, options.epochs)
