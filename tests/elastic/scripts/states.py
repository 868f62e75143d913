"""Scenarios of the ranks in the tests of states: `python states.py SCENARIO ARGUMENT...`."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

sys.path.append(str(Path(__file__).parents[2]))

import numpy
import torch
import torch.distributed as dist

from elastic.text_state import Failing, Text
from outlast.elastic import (
    ModuleState,
    OptimizerState,
    RandomState,
    State,
    load_all_states,
    load_state,
    save_all_states,
    save_state,
)
from outlast.elastic.states import saving, storage
from outlast.errors import OutlastError

RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])


def say(event: str, **fields: Any) -> None:
    """One line, in one write."""
    os.write(1, json.dumps({"event": event, **fields}).encode() + b"\n")


def said(function: Callable[[], Any]) -> Any:
    """Calls a function that may raise, and prints the outcome."""
    try:
        value = function()
    except OutlastError as error:
        say("raised", type=type(error).__name__, message=str(error))
        return None
    say("returned", value=value)
    return value


@contextlib.contextmanager
def group() -> Iterator[None]:
    """A process group, destroyed after a barrier.

    DTensor's caches keep the group of a sharded model until the interpreter ends, and gloo's thread
    with it. If that still has to delete the barrier, it asks for the GIL then, and the process is
    aborted (torch 2.13, on a busy machine). So the barrier is never deleted.
    """
    dist.init_process_group("gloo")
    yield
    last = dist.barrier(async_op=True)
    assert last is not None
    last.wait()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(last))
    dist.destroy_process_group()


class Sum(State):
    """A number on each rank, and the sum, computed by a collective."""

    def __init__(self, name: str, fails_on: int = -1) -> None:
        super().__init__(name)
        self.number = RANK + 1
        self.sum = 0
        self.fails_on = fails_on

    def sync(self) -> None:
        if self.fails_on == RANK:
            raise RuntimeError("no collective today")
        total = torch.tensor(self.number)
        dist.all_reduce(total)
        self.sum = int(total)

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(str(self.sum).encode())

    def load(self, fileobj: BinaryIO) -> None:
        self.sum = int(fileobj.read())


def saves(asynchronous: str = "") -> None:
    with group():
        states = [Sum("sum"), Text("text", f"rank {RANK}")]
        done = save_all_states(bool(asynchronous))
        if asynchronous:
            done.wait()
            done = done.directory
        say("saved", value=done)
        states.clear()


def loads() -> None:
    with group() if WORLD_SIZE > 1 else contextlib.nullcontext():
        states: list[Any] = [Sum("sum"), Text("text"), Text("absent")]
        found = [load_state(state) for state in states]
        say("loaded", found=found, sum=states[0].sum, text=states[1].text)


def saves_without_a_group() -> None:
    state = Text("text", f"rank {RANK}")
    say("saved", value=save_all_states())
    say("state", calls=state.calls)


def loads_without_a_group() -> None:
    """All at once: a load takes no lock."""
    state = Text("text")
    assert load_state(state)
    say("loaded", text=state.text)


def disagrees() -> None:
    with group():
        states = [Text("common")]
        if RANK == 0:
            states.append(Text("first"))
        if RANK == 2:
            states += [Text("third"), Text("own")]
        said(save_all_states)
        say("state", calls=states[0].calls)
        del states[1:]
        said(save_all_states)


def sync_fails(kind: str) -> None:
    """Rank 1 fails before a collective that the others have entered, or without any collective."""
    dist.init_process_group("gloo")
    first = Text("a first")
    second = Sum("b second", fails_on=1) if kind == "collective" else Failing("b second")
    if kind == "alone" and RANK == 1:
        second.methods = {"sync"}  # type: ignore[union-attr]
    said(save_all_states)
    say("state", calls=first.calls)
    if kind == "alone":
        second.methods = set()  # type: ignore[union-attr]
        said(save_all_states)
    there(*range(3))  # one of them has the store
    os._exit(0)  # the group may be out of step


def save_fails() -> None:
    with group():
        state = Failing("a", "save")
        said(save_all_states)
        said(lambda: save_state(state, os.environ["OUTLAST_CHECKPOINT_PATH"] + "/mine"))
        state.methods = set()
        said(save_all_states)


def load_fails() -> None:
    with group():
        states = [Text("a", "saved"), Failing("b")]
        save_all_states()
        states[0].text = "own"
        if RANK == 1:
            states[1].methods = {"load"}  # type: ignore[attr-defined]
        said(load_all_states)
        said(lambda: load_state(states[0]))


def one_does_not_come(when: str) -> None:
    dist.init_process_group("gloo")
    state = Text("a")
    if when == "later":
        save_all_states()
        state.calls.clear()
    if RANK == 1:
        there(0, 2)
    said(lambda: save_all_states(timeout=datetime.timedelta(seconds=1)))
    say("state", calls=state.calls)
    there(RANK)
    there(0, 1, 2)
    os._exit(0)


def interrupted() -> None:
    """Rank 1 is interrupted between two steps of a save, in which the other one waits for it."""
    with group():
        state = Text("a")
        save_all_states()
        if RANK == 1:

            def interrupt() -> None:
                raise KeyboardInterrupt

            release, storage.release = storage.release, interrupt
            with contextlib.suppress(KeyboardInterrupt):
                save_all_states()
            storage.release = release
        else:
            said(save_all_states)
        said(save_all_states)
        del state


def group_is_lost() -> None:
    """Rank 1 ends before it joins the background save; rank 0 continues alone. The store outlives
    the group.
    """
    path = os.environ["MARKS"] + "/store"
    store: Any = dist.FileStore(path, WORLD_SIZE)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD_SIZE)
    state = Text("a", "old")
    save_all_states()
    if RANK == 1:
        saving._on_rank_0 = lambda *args: time.sleep(60)  # type: ignore[assignment]
    handle = save_all_states(asynchronous=True)
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()
    saving.STALE_S = 0.1
    state.text = "new"
    said(save_all_states)
    assert handle is not None
    said(handle.wait)
    assert load_state(state)
    say("loaded", text=state.text)
    os._exit(0)


def there(*ranks: int) -> None:
    """Announces this rank, or waits for others."""
    for rank in ranks:
        path = Path(os.environ["MARKS"]) / str(rank)
        if rank == RANK:
            path.touch()
        while not path.exists():
            time.sleep(0.01)


def one_is_killed_in_its_sync() -> None:
    dist.init_process_group("gloo")

    class Killed(State):
        def sync(self) -> None:
            if RANK == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    state = Killed("a")
    said(lambda: save_all_states(timeout=datetime.timedelta(seconds=1)))
    del state
    there(RANK)
    there(0, 2)
    os._exit(0)


def draws() -> list[Any]:
    return [random.random(), float(numpy.random.random()), float(torch.rand(1)), random.gauss(0, 1)]


def saves_random(alike: str = "") -> None:
    with group() if WORLD_SIZE > 1 else contextlib.nullcontext():
        seed = 7 if alike else 7 + RANK
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        draws()  # random.gauss keeps the second of a pair
        state = RandomState()
        save_all_states()
        del state
        say("drawn", values=[draws() for _ in range(2)])


def loads_random() -> None:
    with group() if WORLD_SIZE > 1 else contextlib.nullcontext():
        state = RandomState()
        assert load_state(state)
        say("drawn", values=[draws() for _ in range(2)])


def sharded(what: str) -> None:
    """Two steps of a sharded model, saved after the first; the second is compared."""
    # Imported only here: these imports take seconds.
    from torch.distributed.fsdp import fully_shard

    from outlast.elastic import ShardedState

    with group() if WORLD_SIZE > 1 else contextlib.nullcontext():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
        if WORLD_SIZE > 1:
            mesh = dist.init_device_mesh("cpu", (WORLD_SIZE,))
            fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        state = ShardedState(model, optimizer)
        if what == "save":
            step(model, optimizer)
            save_all_states()
        else:
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            assert load_state(state)
        step(model, optimizer)
        full = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
        say("weights", values=torch.cat([p.detach().flatten() for p in full]).tolist())
        if what == "refused" and WORLD_SIZE > 1:
            wrong = ModuleState(model, "wrong")
            said(save_all_states)
            del wrong


def step(model: Any, optimizer: Any) -> None:
    """The same batch on every replica, whatever their number."""
    optimizer.zero_grad()
    model(torch.arange(10.0).reshape(2, 5) / 10).square().sum().backward()
    optimizer.step()


def ddp(what: str) -> None:
    """As `sharded`, but under DDP with separate states."""
    with group() if WORLD_SIZE > 1 else contextlib.nullcontext():
        # The DDP module must end before its group. Otherwise its reducer destroys the group while
        # it holds the GIL, and joins gloo's threads; one of them may need the GIL to delete the
        # last barrier (seen on torch 2.13: both wait forever).
        train_under_ddp(what)


def train_under_ddp(what: str) -> None:
    torch.manual_seed(RANK)
    model: Any = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    if WORLD_SIZE > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    states = [ModuleState(model), OptimizerState(optimizer)]
    if what == "save":
        step(model, optimizer)
        save_all_states()
    else:
        assert load_all_states() == ["model", "optimizer"]
    step(model, optimizer)
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    say("weights", values=values.tolist())
    states.clear()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
