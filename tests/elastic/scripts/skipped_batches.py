"""One rank of a wrapped training that leaves out batches: `python skipped_batches.py PLAN`.

The plan is JSON: `path` is the folder of the checkpoints; in the batch `bad` of 12, rank 1 has a
sample that is not finite; `skip` are the batches that the program leaves out by hand. With
`fail_after`, rank 0 raises an exception once, in the step after that of the second iteration.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import outlast
from outlast import inprocess
from outlast.elastic import ElasticLoader, FiniteCheck

PLAN: dict[str, Any] = {"bad": -1, "skip": [], "fail_after": -1, **json.loads(sys.argv[1])}
RANK = int(os.environ["RANK"])
BATCH = 8


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> dict[str, Any]:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs = torch.arange(12.0 * BATCH)[:, None]
    loader = ElasticLoader(inputs, global_batch_size=BATCH, shuffle=False)  # type: ignore[arg-type]
    with outlast.Job(
        PLAN["path"],
        model=model,
        optimizer=optimizer,
        loader=loader,
        every=4,
        checks=FiniteCheck(on_non_finite="skip"),
    ) as job:
        job.restore()
        parallel = DistributedDataParallel(model)
        for _ in job.epochs(1):
            for batch in job.batches(loader):
                call.ping()
                number = int(batch[0].item()) // BATCH
                if number in PLAN["skip"]:
                    continue
                if number == PLAN["bad"] and RANK == 1:
                    batch[0] = torch.nan
                if (RANK, job.steps, call.iteration) == (0, PLAN["fail_after"], 1):
                    raise RuntimeError("a planned fault")
                optimizer.zero_grad()
                (loader.weight * parallel(batch / 96).square().mean()).backward()
                optimizer.step()
                job.step(samples=BATCH)
        steps, samples = job.steps, job.samples
    content = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    weights = hashlib.sha256(content).hexdigest()
    return {"weights": weights, "steps": steps, "samples": samples}


if __name__ == "__main__":
    logging.basicConfig(format="%(name)s %(message)s")
    torch.set_num_threads(1)
    result = train()
    os.write(1, json.dumps({**(result or {})}).encode() + b"\n")
