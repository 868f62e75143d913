"""One rank whose groups do what NCCL's do besides (`LATE_NCCL`): `python communicators.py SCENARIO
FOLDER`. The last rank fails in the first iteration, while the others wait for it on the device.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from socket import SO_ACCEPTCONN, SOL_SOCKET, socket
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group

from late import device
from outlast import inprocess
from outlast.errors import RankShouldRestart
from outlast.inprocess.compose import Compose
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks
from outlast.system.backends import Backend
from outlast.system.sockets import listen

LATE = device.use()
FOLDER = Path(sys.argv[2])
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FAILS = SIZE - 1
LISTENERS: list[socket] = []


def say(event: str, **fields: Any) -> None:
    os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


def reduced() -> float:
    x = torch.ones(4).to("late")
    dist.all_reduce(x)
    return float(x.cpu()[0])


def fail_once_all(what: str) -> None:
    """The last rank fails once the others have come here, and had time to go further."""
    (FOLDER / f"{what} {RANK}").touch()
    if RANK == FAILS:
        while len(list(FOLDER.glob(f"{what} *"))) < SIZE:
            time.sleep(0.002)
        time.sleep(0.3)
        raise RuntimeError("a planned fault")


def be_interrupted() -> None:
    """The abort leaves garbage, and the interrupt comes at about the same time."""
    reduced()
    time.sleep(1000)


def threads() -> list[str]:
    found = []
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            found.append(Path(f"/proc/self/task/{tid}/comm").read_text().strip())
    return found


def before_the_first_collective(iteration: int) -> None:
    if iteration == 0:
        fail_once_all("come")
    assert reduced() == SIZE
    while "NCCL BootstrapR" in threads():  # that of this iteration ends when all know each other
        time.sleep(0.002)


def in_a_second_group(iteration: int) -> None:
    """The program listens, too, at the same address of the host."""
    group = dist.new_group(list(range(SIZE)))
    assert reduced() == SIZE
    LISTENERS.append(listen("127.0.0.1"))
    if iteration == 0:
        fail_once_all("come")
    x = torch.ones(4).to("late")
    dist.all_reduce(x, group=group)
    assert float(x.cpu()[0]) == SIZE
    assert all(each.getsockopt(SOL_SOCKET, SO_ACCEPTCONN) for each in LISTENERS)


def after_the_abort(iteration: int) -> None:
    """The program catches the interrupt, and goes on with a group that has no communicator yet."""
    group = dist.new_group(list(range(SIZE)))
    assert reduced() == SIZE
    if iteration == 0:
        x = torch.ones(4).to("late")
        try:
            fail_once_all("come")
            be_interrupted()
        except RankShouldRestart:
            dist.all_reduce(x, group=group)
            raise AssertionError("not interrupted") from None


def destroyed_in_a_finally(iteration: int) -> None:
    group = dist.new_group(list(range(SIZE)))
    x = torch.ones(4).to("late")
    dist.all_reduce(x, group=group)
    try:
        assert reduced() == SIZE
        if iteration == 0:
            fail_once_all("come")
            be_interrupted()
    finally:
        dist.destroy_process_group(group)
        destroy_process_group()  # imported by name, as in torch's tutorials


def an_abort_that_stays(iteration: int) -> None:
    assert reduced() == SIZE
    if iteration == 0:
        if RANK == 0:
            os.environ["LATE_NCCL"] = "stays"
            Backend.abort_s = 1.0
        fail_once_all("come")
        be_interrupted()


def a_captured_graph(iteration: int) -> None:
    graph = LATE.Graph()
    model = {"graph": graph}
    model["itself"] = model  # as a model does that has its graphs
    assert reduced() == SIZE
    if iteration == 0:
        fail_once_all("come")
        be_interrupted()


SCENARIOS: dict[str, Callable[[int], None]] = {
    each.__name__: each
    for each in (
        before_the_first_collective,
        in_a_second_group,
        after_the_abort,
        destroyed_in_a_finally,
        an_abort_that_stays,
        a_captured_graph,
    )
}


@inprocess.Wrapper(
    rank_assignment=Compose(ShiftRanks(), AwaitReplacements(60)),
    soft_timeout=15,
    hard_timeout=20,
    termination_grace_time=1,
)
def train(call: inprocess.CallWrapper) -> None:
    say("entered", iteration=call.iteration)
    dist.init_process_group("cpu:gloo,late:lategloo")
    SCENARIOS[sys.argv[1]](call.iteration)
    if dist.is_initialized():
        dist.destroy_process_group()
    say("returned", iteration=call.iteration)


FOLDER.mkdir(exist_ok=True)
train()
