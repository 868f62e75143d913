"""A store that the program's rank 0 serves: as in the peer's examples and in Megatron, before the
wrapped function, or in it. Under `outlast run`, with faults while it is used.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from launch.runs import Run
from procs import free_port

pytestmark = pytest.mark.usefixtures("zygote")

PROGRAM = """
import json, os, signal, sys
import torch, torch.distributed as dist
import outlast.compat.nvrx
outlast.compat.nvrx.install()
import nvidia_resiliency_ext.inprocess as inprocess

RANK, SIZE, PORT = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
PLACE, FAULTS = sys.argv[2], json.loads(sys.argv[3])

def open_store():
    return dist.TCPStore("127.0.0.1", PORT, SIZE, RANK == 0, wait_for_workers=True)

def fail(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(f"planned, {os.getpid()}")

@inprocess.Wrapper()
def train(store, call: inprocess.CallWrapper):
    store = store or (open_store() if PLACE == "in the function" else KEPT)
    rank, k = int(os.environ["RANK"]), call.iteration
    who, how, where = FAULTS[k] if k < len(FAULTS) else (-1, "", "")
    named = dist.PrefixStore(str(k), store)
    named.set(f"entered/{rank}", "")
    named.wait([f"entered/{each}" for each in range(SIZE)])
    if rank == who and where == "before the group":
        fail(how)
    if where == "in a wait":
        fail(how) if rank == who else named.get("never")
    dist.init_process_group("gloo", store=named, rank=rank, world_size=SIZE)
    if rank == who:
        fail(how)
    dist.all_reduce(total := torch.ones(1))
    said = {"pid": os.getpid(), "rank": rank, "env": {}, "total": total.item()}
    print(json.dumps(said), flush=True)
    dist.destroy_process_group()

KEPT = None if PLACE == "in the function" else open_store()
train(KEPT if PLACE == "as an argument" else None)
"""


KILL, RAISE = "kill", "raise"


def survivors(tmp_path: Path, place: str, *faults: tuple[int, str, str]) -> set[int]:
    """Runs it with one fault in each iteration; returns the ranks whose first process was there at
    the end.
    """
    arguments = [str(free_port()), place, json.dumps(faults)]
    options = ["--nproc-per-node=3", "--max-restarts=10"]
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # what torch says of a server that has just died
    with Run(tmp_path, PROGRAM, *options, args=arguments, env=quiet) as run:
        last = [run.ready(rank) for rank in range(3)]
        assert run.wait() == 0, run.err
    assert [each.more["total"] for each in last] == [3.0] * 3
    said = f"{len(faults)} restart{'s' * (len(faults) > 1)}:"
    assert said in run.words[-1], run.err
    first = dict(re.findall(r"rank (\d) is pid (\d+)", run.words[0]))
    return {each.rank for each in last if str(each.pid) == first[str(each.rank)]}


@pytest.mark.slow
def test_a_wait_for_a_rank_that_fails_is_ended_and_the_store_serves_on(tmp_path: Path) -> None:
    faults = [(2, RAISE, "before the group"), (0, RAISE, "in a wait"), (1, RAISE, "in the group")]
    assert survivors(tmp_path, "as an argument", *faults) == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["as an argument", "as a global"])
def test_the_rank_that_serves_the_store_is_killed_again_and_again(
    tmp_path: Path, place: str
) -> None:
    faults = [(0, KILL, "in the group"), (0, KILL, "before the group"), (0, KILL, "in a wait")]
    assert survivors(tmp_path, place, *faults, (1, KILL, "in a wait")) == {2}


@pytest.mark.slow
def test_waits_in_a_store_that_the_function_opens_are_ended(tmp_path: Path) -> None:
    faults = [(2, RAISE, "in a wait"), (1, KILL, "before the group"), (0, KILL, "in a wait")]
    assert survivors(tmp_path, "in the function", *faults) == {2}


JOINS = """
import json, os, signal, sys
import torch.distributed as dist
from outlast.inprocess import Wrapper

RANK, SIZE, PORT = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
FIRST = os.environ["OUTLAST_REPLACEMENT"] == "0"
STORE = dist.TCPStore("127.0.0.1", PORT, SIZE, RANK == 0, wait_for_workers=True)
if RANK == 0:
    STORE.set("pid", str(os.getpid()))
if RANK == 1 and not FIRST:
    os.kill(int(STORE.get("pid")), signal.SIGKILL)

@Wrapper()
def train(call):
    if call.iteration == 0:
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        STORE.get("never")
    named = dist.PrefixStore(str(call.iteration), STORE)
    named.set(str(RANK), "")
    named.wait([str(each) for each in range(SIZE)])
    print(json.dumps({"pid": os.getpid(), "rank": RANK, "env": {}}), flush=True)

train()
"""


@pytest.mark.slow
def test_the_server_is_lost_while_the_replacement_of_another_rank_joins(tmp_path: Path) -> None:
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    options = ["--nproc-per-node=3", "--max-restarts=10"]
    with Run(tmp_path, JOINS, *options, args=[str(free_port())], env=quiet) as run:
        for rank in range(3):
            run.ready(rank)
        assert run.wait() == 0, run.err
