"""Trains a small network on handwritten digits with DDP, and loses no step to a fault.

    outlast run --nproc-per-node 4 examples/digits.py

After a fault the function restarts on every healthy rank, in the same process, and continues from
the newest step that a surviving rank has: a replaced rank receives its state from another one.
Checkpoints are saved in the background for faults that leave no copy of the state, such as the loss
of all ranks. The data (1,797 images of 8 x 8 pixels) ship with scikit-learn.
"""

import argparse
import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import outlast
from outlast import inprocess
from outlast.elastic import ElasticLoader

GLOBAL_BATCH = 96  # divisible by 1, 2, 3, 4, 6, 8: the job may change its size


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The training images and labels, and 360 images and labels for testing."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return images[:-360], labels[:-360], images[-360:], labels[-360:]


@inprocess.Wrapper(soft_timeout=inprocess.Adaptive())
def train(options: argparse.Namespace, call: inprocess.CallWrapper | None = None) -> str:
    """Trains to the end, and describes the result: accuracy, and a checksum of the weights."""
    assert call is not None
    dist.init_process_group("gloo")
    images, labels, test_images, test_labels = data()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    ddp = DistributedDataParallel(model)
    loader = ElasticLoader(TensorDataset(images, labels), global_batch_size=GLOBAL_BATCH)
    with outlast.Job(
        options.state, model=ddp, optimizer=optimizer, loader=loader, every=options.save_every
    ) as job:
        job.restore()
        for _ in job.epochs(options.epochs):
            for inputs, targets in job.batches(loader):
                call.ping()
                loss = nn.functional.cross_entropy(ddp(inputs), targets)
                optimizer.zero_grad()
                (loader.weight * loss).backward()
                optimizer.step()
                job.step()

    del ddp  # before its process group: see "Limits and troubleshooting" in the documentation
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    result = f"accuracy {accuracy:.1%}, weights {hashlib.sha256(weights).hexdigest()[:16]}"
    if dist.get_rank() == 0:
        print(f"{result}, {job.steps} steps", flush=True)
    dist.destroy_process_group()
    return result


def main() -> None:
    """Parses the options, and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=200, help="of 15 steps each")
    parser.add_argument("--save-every", type=int, default=500, help="steps between two saves")
    parser.add_argument("--state", type=Path, default=Path("digits"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(options)


if __name__ == "__main__":
    main()
