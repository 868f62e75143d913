"""Trains a generator and a discriminator with DDP, and an average of the generator, in one job.

    outlast run --nproc-per-node 2 examples/gan.py

The generator learns to draw points on a circle. After a fault, the three models and both optimizers
continue from the newest step that a surviving rank has.
"""

import argparse
import hashlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import outlast
from outlast import inprocess
from outlast.elastic import ElasticLoader


def network(inputs: int, outputs: int) -> nn.Module:
    """A small network."""
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, outputs))


@inprocess.Wrapper()
def train(options: argparse.Namespace, call: inprocess.CallWrapper | None = None) -> None:
    """Trains to the end, and prints a checksum of all weights."""
    assert call is not None
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    angles = torch.rand(960, 1) * 6.283
    points = TensorDataset(torch.cat([angles.cos(), angles.sin()], 1))
    loader = ElasticLoader(points, global_batch_size=96)

    generator, discriminator = network(2, 2), network(2, 1)
    ema = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    g, d = DistributedDataParallel(generator), DistributedDataParallel(discriminator)
    models = {"g": g, "d": d, "ema": ema}
    optimizers = {
        "g": torch.optim.Adam(g.parameters(), lr=1e-3),
        "d": torch.optim.Adam(d.parameters(), lr=1e-3),
    }
    with outlast.Job(options.state, model=models, optimizer=optimizers, loader=loader) as job:
        job.restore()
        for _ in job.epochs(options.epochs):
            for (real,) in job.batches(loader):
                call.ping()
                fake = generator(torch.randn_like(real)).detach()
                judged_real, judged_fake = d(torch.cat([real, fake])).chunk(2)
                d_loss = softplus(-judged_real).mean() + softplus(judged_fake).mean()
                (loader.weight * d_loss).backward()
                optimizers["d"].step()

                g_loss = softplus(-discriminator(g(torch.randn_like(real)))).mean()
                (loader.weight * g_loss).backward()
                optimizers["g"].step()
                ema.update_parameters(generator)
                for optimizer in optimizers.values():
                    optimizer.zero_grad()  # also what the generator's loss has left in `d`
                job.step()

    del g, d, models  # before their process group
    if dist.get_rank() == 0:
        weights = b"".join(p.detach().numpy().tobytes() for p in job.module.parameters())
        digest = hashlib.sha256(weights).hexdigest()[:16]
        print(f"weights {digest}, {job.steps} steps", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Parses the options, and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=100, help="of 10 steps each")
    parser.add_argument("--state", type=Path, default=Path("gan"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(options)


if __name__ == "__main__":
    main()
