"""A `Job` whose third-party loaders have a different state on each rank: `SCRIPT PATH`.

It saves once and restores twice: from memory in the same job, and from storage in a new one.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import outlast

RANK = int(os.environ["RANK"])


class Loader:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"at": None}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def say(event: str, **fields: Any) -> None:
    """Prints an event as one line, in one write."""
    os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


def job(loader: Loader) -> outlast.Job:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return outlast.Job(sys.argv[1], model=model, optimizer=optimizer, loader=loader, every=None)


def main() -> None:
    dist.init_process_group("gloo")
    loader = Loader()
    with job(loader) as first:
        say("restored", step=first.restore(), state=loader.state)
        loader.state = {"at": {"rank": RANK}, "ahead": list(range(RANK))}
        first.step()
        first.save().wait()
        loader.state = {"other": [1]}
        say("restored", step=first.restore(), state=loader.state)
    loader = Loader()
    with job(loader) as second:
        say("restored", step=second.restore(), state=loader.state)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
