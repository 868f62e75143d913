"""The training of the benchmark `moves`: FSDP2 with Adam, under `outlast run` or torchrun.

Each rank appends a line for each step to its file in the folder `--trace`. While the file `--fail`
exists, rank 1 fails a fixed number of steps after a checkpoint: under torchrun it dies, and else it
waits until its host does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

import outlast
from outlast import inprocess
from outlast.elastic.tensors import local

EVERY, AFTER = 10, 3
"""Steps between two checkpoints, and from a checkpoint to a fault."""
PARTS = ("group", "model", "`Job()`", "restore", "first step")
_PAUSE_S = 0.2
_WAIT_S = 1000.0


def sharded(mib: int, ranks: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """Equal layers, of `mib` MiB a rank together with Adam's two moments, without values yet; and
    what gives them initial values.
    """
    parameters = ranks * mib * 2**20 / 4 / 3
    width = min(2048, round((parameters / 3) ** 0.5))
    with torch.device("meta"):
        count = max(3, round(parameters / width**2))
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")

    def begin() -> None:
        for each in model.parameters():
            nn.init.constant_(local(each), 1 / width)

    return model, torch.optim.Adam(model.parameters(), lr=1e-6), begin


class Steps:
    """The steps of one iteration, or of one attempt of torchrun."""

    def __init__(self, options: argparse.Namespace, iteration: int) -> None:
        self.marks = [time.monotonic()]
        self._options, self._iteration, self._host = options, iteration, socket.gethostname()

    def mark(self) -> None:
        """Notes the end of a part."""
        self.marks.append(time.monotonic())

    def make(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Makes a step, and notes its end."""
        began = time.monotonic()
        width = next(model.parameters()).shape[1]
        model(torch.ones(4, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if len(self.marks) == len(PARTS):
            self.mark()
        self._note(step=step, marks=self.marks, seconds=time.monotonic() - began)

    def pause(self, step: int) -> None:
        """Between two steps; a fault that is due comes here."""
        fail: Path = self._options.fail
        if dist.get_rank() == 1 and step > EVERY and step % EVERY == AFTER and fail.exists():
            fail.unlink()
            self._note(fault=step)
            if self._options.torchrun:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(_WAIT_S)
        time.sleep(_PAUSE_S)

    def _note(self, **fields: Any) -> None:
        line = {"host": self._host, "time": time.monotonic(), "iteration": self._iteration}
        line |= {"rank": dist.get_rank(), **fields}
        with (self._options.trace / f"{self._host}-{os.getpid()}-{_STARTED}.jsonl").open(
            "a"
        ) as log:
            log.write(json.dumps(line) + "\n")


_STARTED = time.monotonic_ns()


@inprocess.Wrapper()
def train(options: argparse.Namespace, call: inprocess.CallWrapper | None = None) -> None:
    """With outlast."""
    assert call is not None
    steps = Steps(options, call.iteration)
    dist.init_process_group("gloo")
    steps.mark()
    model, optimizer, begin = sharded(options.mib, dist.get_world_size())
    steps.mark()
    with outlast.Job(options.state, model=model, optimizer=optimizer, every=EVERY) as job:
        steps.mark()
        begin()
        job.restore()
        steps.mark()
        while True:
            call.ping()
            steps.make(model, optimizer, job.steps + 1)
            job.step()
            steps.pause(job.steps)


def train_with_torchrun(options: argparse.Namespace) -> None:
    """With torchrun and `torch.distributed.checkpoint`."""
    kinds: Any = dist
    agent = kinds.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # On keys of its own in each attempt, which the launchers may count differently: one restarts
    # for a failure, and the other for a new member.
    attempt = (agent.add("arrivals", 1) - 1) // ranks
    steps = Steps(options, attempt)
    store = kinds.PrefixStore(str(attempt), agent)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    steps.mark()
    model, optimizer, begin = sharded(options.mib, ranks)
    steps.mark()
    begin()
    steps.mark()
    found = sorted(options.state.glob("step-*/.metadata"))  # written last
    step = 0
    if found:
        step = int(found[-1].parent.name.removeprefix("step-"))
        state = _state(model, optimizer)
        load(state, checkpoint_id=found[-1].parent)
        dcp_state.set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    steps.mark()
    while True:
        step += 1
        steps.make(model, optimizer, step)
        if step % EVERY == 0:
            save(_state(model, optimizer), checkpoint_id=options.state / f"step-{step:06d}")
        steps.pause(step)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    states = dcp_state.get_state_dict(model, optimizer)
    return {"model": states[0], "optimizer": states[1]}


def main() -> None:
    """Parses the options, and trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--state", "--trace", "--fail"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--mib", type=int, required=True, help="of state, a rank")
    parser.add_argument("--torchrun", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train_with_torchrun(options) if options.torchrun else train(options)


if __name__ == "__main__":
    main()
