"""A training loop with torchdata's loader and its workers: `python stateful_loader.py PLAN`.

It prints the samples of each step, and stops after a given step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from outlast.elastic import Job, StateDictState, load_state, save_all_states

PLAN: dict[str, Any] = {
    "kind": "map",
    "given": "loader",
    "stop": None,
    **json.loads(sys.argv[1]),
}
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
SAMPLES, BATCH, EPOCHS = 40, 3, 2


def say(event: str, **fields: Any) -> None:
    """Prints an event as one line, in one write."""
    os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """Numbers, each from one worker of one rank. It reads ahead, as shuffling does, and its
    state includes what it has read ahead.
    """

    def __init__(self) -> None:
        self.at = 0
        self.ahead: list[int] = []
        self.last: dict[str, int] | None = None

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker is not None
        share = WORLD_SIZE * worker.num_workers
        mine = list(range(RANK * worker.num_workers + worker.id, SAMPLES, share))
        while self.at < len(mine) or self.ahead:
            while self.at < len(mine) and len(self.ahead) < 4:
                self.ahead.append(mine[self.at])
                self.at += 1
            number = self.ahead.pop(len(self.ahead) // 2)
            self.last = {"number": number}
            yield number
        # The position stays at the end: after a restore, torchdata iterates an exhausted worker
        # again. In the next epoch, new workers get a copy of the main process's initial state.

    def state_dict(self) -> dict[str, Any]:
        return {"rank": RANK, "at": self.at, "ahead": list(self.ahead), "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == RANK, "the state of another rank"
        self.at, self.ahead, self.last = state["at"], list(state["ahead"]), state["last"]
        assert not self.at or self.last is not None, "the state is incomplete"


class Epochs:
    """Counts epochs, which torchdata's loader does not."""

    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def make_loader() -> Any:
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": 2, "prefetch_factor": 4}
    if PLAN["kind"] == "stream":
        return StatefulDataLoader(Stream(), **options)
    if WORLD_SIZE == 1:
        return StatefulDataLoader(Numbers(), shuffle=True, **options)
    return StatefulDataLoader(
        Numbers(), sampler=StatefulDistributedSampler(Numbers(), seed=3), **options
    )


def train(loader: Any, epochs: Epochs, step: Any) -> None:
    while epochs.done < EPOCHS:
        for numbers in loader:
            say("trained", epoch=epochs.done, numbers=numbers.tolist())
            step()
        epochs.done += 1


def with_job(loader: Any, epochs: Epochs) -> None:
    model = nn.Linear(1, 1)
    states: dict[str, Any] = {"epochs": epochs}
    if PLAN["given"] == "state":
        states[f"data of rank {RANK}"] = loader
    with Job(
        PLAN["path"],
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loader=loader if PLAN["given"] == "loader" else None,
        states=states,
        every=None,
    ) as job:
        say("restored", step=job.restore())

        def step() -> None:
            if PLAN["stop"] is not None:
                if job.steps + 1 == PLAN["stop"] and RANK == 0:
                    job.stop("enough")
                time.sleep(0.02)  # the request must arrive before training ends
            job.step()

        train(loader, epochs, step)


def with_states(loader: Any, epochs: Epochs) -> None:
    states = [StateDictState(loader, "data"), StateDictState(epochs, "epochs")]
    say("restored", step=[load_state(state) for state in states])
    left = PLAN["stop"]

    def step() -> None:
        nonlocal left
        if left is not None:
            left -= 1
            if left == 0:
                save_all_states()
                raise SystemExit(143)

    train(loader, epochs, step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(int(PLAN["seed"]))
    dist.init_process_group("gloo")
    (with_states if PLAN["given"] == "states" else with_job)(make_loader(), Epochs())
    dist.barrier()
    dist.destroy_process_group()
