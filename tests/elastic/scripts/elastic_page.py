"""Runs the example of docs/elastic.md with a small model: `elastic_page.py RESULTS FAULT EVERY`.

The fault happens once: in step 15, on rank 1, in a forward pass within an epoch. Each rank records
the samples of each step.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

RESULTS, FAULT, EVERY = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
MADE: list[nn.Module] = []
JOBS: list[Any] = []
PAGE = Path(__file__).parents[3] / "docs" / "elastic.md"


class Data(Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(300, 6, generator=generator)
        self.y = torch.randint(0, 3, (300,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], (self.y[index], index)


def once() -> bool:
    """Whether this is the first call in any process."""
    try:
        (RESULTS / "fault").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def make_model() -> nn.Module:
    torch.manual_seed(0)
    MADE.append(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)))
    return MADE[-1]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def loss_fn(output: torch.Tensor, labels: Any) -> torch.Tensor:
    JOBS[:] = [sys._getframe(1).f_locals["job"]]
    step = JOBS[0].steps + 1
    rank = int(os.environ["RANK"])
    if FAULT != "none" and step == 15 and rank == 1 and once():
        if FAULT == "exception":
            raise RuntimeError("a fault")
        os.kill(os.getpid(), signal.Signals[FAULT])
    line = json.dumps({"step": step, "indices": labels[1].tolist()})
    with (RESULTS / f"rank{rank}").open("a") as file:
        file.write(line + "\n")
    return nn.functional.cross_entropy(output, labels[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.chdir(RESULTS)
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    assert "loader=loader)" in code
    if EVERY != "100":
        code = code.replace("loader=loader)", f"loader=loader, every={EVERY})")
    names: dict[str, Any] = {"dataset": Data(), "loss_fn": loss_fn}
    names |= {"make_model": make_model, "make_optimizer": make_optimizer}
    exec(compile(code, str(PAGE), "exec"), names)
    names["train"]()
    (job,) = JOBS
    print(f"rank {job.rank}: {job.steps} steps, {job.samples} samples", flush=True)
    content = hashlib.sha256()
    for tensor in MADE[-1].state_dict().values():
        content.update(tensor.numpy().tobytes())
    (RESULTS / f"weights{os.environ['RANK']}").write_text(content.hexdigest())
