"""A wrapped `Job` that no restart can help: `SCRIPT PATH MISTAKE`.

MISTAKE is "none", "no restore", "other model" or "unsavable". Prints how often the function began.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import outlast
from outlast import inprocess

PATH, MISTAKE = sys.argv[1:]


class Notes:
    """A state that can be saved at first."""

    def __init__(self) -> None:
        self.last: object = None

    def state_dict(self) -> dict[str, object]:
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.last = state["last"]


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    os.write(1, json.dumps({"iteration": call.iteration}).encode() + b"\n")
    dist.init_process_group("gloo")
    model = nn.Linear(2, 3 if MISTAKE == "other model" else 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    notes = Notes()
    with outlast.Job(
        PATH, model=model, optimizer=optimizer, every=2, states={"notes": notes}
    ) as job:
        if MISTAKE != "no restore":
            job.restore()
        for _ in range(5):
            call.ping()
            if MISTAKE == "unsavable":
                notes.last = lambda: None
            job.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
