"""Trains a small network on handwritten digits with DDP, and survives faults.

    outlast run --nproc-per-node 4 examples/digits.py

What it needs for that is the decorator, a ping per step, and a checkpointer. After a fault the
function restarts on every healthy rank, in the same process, restores the last checkpoint and
continues. The data (1,797 images of 8 x 8 pixels) ship with scikit-learn.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast.inprocess as inprocess
from outlast.async_checkpoint import Checkpointer, Retention

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
def train(options: argparse.Namespace, call: inprocess.CallWrapper | None = None) -> float:
    """Trains to the end, from the last checkpoint. Returns the accuracy on the test images."""
    assert call is not None
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    images, labels, test_images, test_labels = data()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    # State that only the optimizer changes is copied during the next forward and backward pass.
    checkpointer = Checkpointer(options.state, keep=Retention(last=2), overlap=optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    first = checkpointer.restore(state) or 0
    optimizer.load_state_dict(state["optimizer"])
    ddp = DistributedDataParallel(model)
    if rank == 0:
        print(f"iteration {call.iteration}: {world_size} ranks from step {first}", flush=True)

    for step in range(first, options.steps):
        call.ping()
        # The batch depends on the step alone; each rank takes its share of it.
        pick = torch.randperm(len(images), generator=torch.Generator().manual_seed(step))
        mine = pick[:GLOBAL_BATCH][rank::world_size]
        loss = nn.functional.cross_entropy(ddp(images[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % options.save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with call.long_phase():  # on a slow disk it waits for the previous save
                checkpointer.save(step + 1, state)

    checkpointer.close()
    del ddp  # before its process group: see "Troubleshooting" in the documentation
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    dist.destroy_process_group()
    return accuracy


def main() -> None:
    """Parses the options, trains, and prints the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--save-every", type=int, default=20, help="steps between two saves")
    parser.add_argument("--state", type=Path, default=Path("digits"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    accuracy = train(options)
    # A process that joined after the others had finished has no result.
    if accuracy is not None and os.environ.get("RANK", "0") == "0":
        print(f"accuracy {accuracy:.1%}", flush=True)


if __name__ == "__main__":
    main()
