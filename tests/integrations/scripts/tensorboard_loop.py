"""A loop of the program that logs into TensorBoard's event files, as in docs/elastic.md: `outlast
run tensorboard_loop.py PLAN`, see `own_programs.py`. Its points: `logged N`, before `job.step()`;
`evaluated N`, in a function of `job.after_steps`, when it has logged.
"""

import json
import sys

import torch
import torch.distributed as dist
from planned_faults import RANK, PlannedFaults, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from torch.utils.tensorboard import SummaryWriter

import outlast
from outlast import inprocess
from outlast.elastic import ElasticLoader

PLAN = json.loads(sys.argv[1])
reach = PlannedFaults(PLAN, {}).reach


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    loader = ElasticLoader(TensorDataset(x, x.sum(1, keepdim=True)), global_batch_size=8)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    writer: SummaryWriter | None = None

    def log(name: str, value: float, step: int) -> None:
        nonlocal writer
        if RANK == 0:
            if writer is None:
                writer = SummaryWriter(PLAN["path"] + "-runs", purge_step=job.steps + 1)
            writer.add_scalar(name, value, step)
            if PLAN.get("flush", True):
                writer.flush()

    def evaluate() -> None:
        with torch.no_grad():
            log(
                "evaluation",
                nn.functional.l1_loss(model(x), x.sum(1, keepdim=True)).item(),
                job.steps,
            )
        reach(f"evaluated {job.steps}", call.iteration)

    with outlast.Job(PLAN["path"], model=model, optimizer=optimizer, loader=loader) as job:
        job.after_steps(4, evaluate)
        job.restore()
        say("restored", step=job.steps, source=job.restored_from)
        for _ in job.epochs(3):
            for inputs, targets in job.batches(loader):
                loss = loader.weight * nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                log("loss", loss.item(), job.steps + 1)
                reach(f"logged {job.steps + 1}", call.iteration)
                job.step()
    if writer is not None:
        writer.close()
    weights = sum(p.double().sum().item() for p in model.parameters()).hex()
    say("computed", name="weights", value=weights)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
