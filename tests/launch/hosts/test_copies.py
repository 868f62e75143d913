"""`outlast run` on several hosts: the loss of a host is made good from memory, not from storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.hosts.agents import Hosts

TRAINS = """
import json, os, sys, tempfile, threading
tempfile.tempdir = "/tmp"  # the paths of sockets are short
import torch
import torch.distributed as dist
from outlast.async_checkpoint import Checkpointer
from outlast.events.types import CheckpointRestored, CopyCompleted
from outlast.inprocess import CallWrapper, Wrapper


class Sink:
    def __init__(self):
        self.restored, self.copied = None, threading.Event()

    def write(self, event):
        if isinstance(event, CheckpointRestored):
            self.restored = event
        elif isinstance(event, CopyCompleted):
            self.copied.set()

    def close(self):
        pass


def say(event, **fields):
    place = {"pid": os.getpid(), "rank": dist.get_rank(), "env": {}}
    print(json.dumps({**place, "event": event, **fields}), flush=True)


def train(call=None):
    dist.init_process_group("gloo")
    rank, sink = dist.get_rank(), Sink()
    checkpointer = Checkpointer(sys.argv[1], replicas=1, events=sink)
    state = {"weight": torch.zeros(1000), f"own{rank}": torch.zeros(1000)}
    step = checkpointer.restore(state)
    if step is None:
        full = {"weight": torch.ones(1000), f"own{rank}": torch.full((1000,), rank + 2.0)}
        checkpointer.save(1, full).wait()
        sink.copied.wait()
        dist.barrier()
        say("saved")
        while True:
            dist.all_reduce(torch.ones(1))
    event = sink.restored
    right = bool((state["weight"] == 1).all() and (state[f"own{rank}"] == rank + 2).all())
    say("restored", step=step, source=event.source, fetched=event.fetched_bytes > 0, right=right)
    dist.barrier()
    checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()


def wrapped(call: CallWrapper):
    train()


if sys.argv[2] == "wrapped":
    Wrapper()(wrapped)()
else:
    train()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wrapped", "plain"])
def test_the_spare_host_fetches_the_copy_of_the_lost_one(tmp_path: Path, kind: str) -> None:
    """In place, and with a restart of all workers: the survivor has its own snapshot both times."""
    options = ("--nnodes=2", "--max-restarts=2")
    with Hosts(tmp_path, TRAINS, *options, args=[str(tmp_path / "c"), kind]) as hosts:
        one, two = hosts.start_all(2)
        spare = hosts.start(4)
        spare.until_said("is a spare")
        assert one.ready(0).more["event"] == "saved"
        assert two.ready(1).more["event"] == "saved"
        two.process.kill()
        survivor, replacement = one.ready(0).more, spare.ready(1).more
        for restored, fetched in ((survivor, False), (replacement, True)):
            assert restored == {
                "event": "restored",
                "step": 1,
                "source": "copies",
                "fetched": fetched,
                "right": True,
            }
        assert [run.wait() for run in (one, spare)] == [0, 0]
