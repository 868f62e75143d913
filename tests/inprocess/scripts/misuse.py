"""Wrapped calls in unusual situations: errors, ports, nesting, threads, signals."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from rank import main, say, scenario, wrapped
from rank_actions import collective, die, finish, join_group, rank, seconds, wait_forever

from outlast.events.emitter import NullSink
from outlast.events.event import Event
from outlast.events.types import Completed
from outlast.inprocess import CallWrapper, Wrapper
from outlast.inprocess.abort import AbortTorchDistributed
from outlast.inprocess.initialize import RetryController
from outlast.inprocess.interruption.gloo import pair_sockets


def _ask_of_rank_1(how: str, call: CallWrapper) -> None:
    if how == "kill":
        die()
    if how == "clean up":
        try:
            raise KeyError("the sample is missing")
        finally:
            dist.destroy_process_group()
            wait_forever()  # the restart after the echoes interrupts it here
    with call.atomic():  # so that its own fault is reported after its echoes
        store = call.state.store
        dist.destroy_process_group()
        store.wait(["echo"])
        time.sleep(0.1)
        raise KeyError("the sample is missing")


def _wait_in_a_handler() -> None:
    """Is interrupted where it handles an exception, which has failed nothing."""
    try:
        raise LookupError("not in the cache")
    except LookupError:
        wait_forever()


@scenario
def aborted_by_the_controller() -> None:
    """Rank 1 fails in every iteration, until the controller ends the job."""
    how = sys.argv[2]

    @wrapped(initialize=RetryController(max_iterations=1 if how == "kill" else 2))
    def train(call: CallWrapper) -> None:
        join_group()
        store = call.state.store
        if rank() == 1:
            _ask_of_rank_1(how, call)
        if rank() == 2 and how == "kill":
            _wait_in_a_handler()
        try:
            while True:
                dist.barrier()  # ends with the echo of rank 1's end, or with the interrupt
        except RuntimeError:
            store.set("echo", "1")
            raise

    train()


@scenario
@wrapped(
    soft_timeout=seconds(1.5),
    hard_timeout=seconds(2),
    heartbeat_timeout=seconds(2),
    barrier_timeout=seconds(4),
)
def port_taken(call: CallWrapper) -> None:
    """The test holds the port of the job, with a server that is not a store."""
    say("must not be entered")


class Unprepared(AbortTorchDistributed):
    """Fails on rank 0 during the setup of the call, after the monitor process has started."""

    def prepare(self) -> None:
        if rank() == 0:
            raise OSError("not prepared")


@scenario
@wrapped(abort=Unprepared())
def fails_coming_up(call: CallWrapper) -> int:
    return join_group()


@scenario
def nested_and_repeated() -> None:
    """A call within a call; two calls in sequence; a call with an initialized process group."""

    @Wrapper()
    def inner() -> None:
        say("must not be entered")

    @wrapped()
    def train(call: CallWrapper) -> list[int]:
        try:
            inner()
        except ValueError as error:
            say("nested", message=str(error))
        join_group()
        if call.iteration == 0 and rank() == 1:
            raise ValueError("a planned fault")
        return [finish(), call.iteration]

    environment = dict(os.environ)
    for _ in range(3):
        train()
        assert dict(os.environ) == environment
    # A group of one, on a separate store: the last call may still hold the port.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        train()
    except ValueError as error:
        say("initialized", message=str(error))
    dist.destroy_process_group()


class EndsLate(NullSink):
    """Rank 0 still needs the store of the call when the others have long left it."""

    def write(self, event: Event) -> None:
        if isinstance(event, Completed) and rank() == 0:
            time.sleep(0.5)


@scenario
def calls_in_sequence() -> None:
    """Calls that leave their groups behind, and then a function that is not wrapped."""

    @wrapped()
    def train(call: CallWrapper) -> list[int]:
        size = join_group()
        dist.new_group(range(size))
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        ddp(torch.ones(1, 1)).sum().backward()
        if call.iteration == 0 and rank() == size - 1:
            raise ValueError("a planned fault")
        return [collective(), call.iteration]

    @wrapped(event_sink=EndsLate())
    def evaluate(call: CallWrapper) -> int:
        return join_group()

    def measure() -> int:
        size = join_group()
        dist.destroy_process_group()
        return size

    environment = dict(os.environ)
    for function in (train, evaluate, measure, train):
        say("result", value=function())
        assert dict(os.environ) == environment
        assert not dist.is_initialized()
        assert not pair_sockets()


@scenario
def alone() -> None:
    """One process without a launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)

    @wrapped(repeated_faults=None)
    def train(call: CallWrapper) -> list[int]:
        size = join_group()
        if call.iteration < 3:
            raise ValueError("a planned fault")
        return [finish(), size]

    train()


@wrapped()
def _fails_once(call: CallWrapper) -> int:
    """A function that loops in Python, so that an asynchronous exception can be raised in it."""
    join_group()
    if call.iteration == 0:
        if rank() == 1:
            raise ValueError("a planned fault")
        with call.atomic():
            pass
        while True:
            time.sleep(0.01)
    return finish()


@scenario
def in_another_thread() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(_fails_once()))
    thread.start()
    thread.join()
    say("thread", results=results)


@scenario
def signal_taken() -> None:
    """The user has a handler for SIGURG: it stays installed, and keeps its meaning."""
    got: list[int] = []

    def mine(number: int, frame: object) -> None:
        got.append(number)

    signal.signal(signal.SIGURG, mine)
    _fails_once()
    assert signal.getsignal(signal.SIGURG) is mine
    os.kill(os.getpid(), signal.SIGURG)
    say("signals", got=got)


@scenario
def foreign_connection() -> None:
    """Connections that are not torch's stay open: one from before the call, one from inside."""
    server = socket.create_server(("127.0.0.1", 0))
    pairs = [_connection(server)]

    @wrapped(repeated_faults=None)
    def train(call: CallWrapper) -> int:
        if call.iteration == 0:
            pairs.append(_connection(server))
        join_group()
        if call.iteration < 3:
            if rank() == 1:
                raise ValueError("a planned fault")
            dist.barrier()
            wait_forever()
        for ours, theirs in pairs:
            ours.sendall(b"still here")
            say("heard", text=theirs.recv(100).decode())
        return finish()

    train()
    for ours, theirs in pairs:
        theirs.sendall(b"afterwards")
        say("heard", text=ours.recv(100).decode())


def _connection(server: socket.socket) -> tuple[socket.socket, socket.socket]:
    ours = socket.create_connection(server.getsockname())
    return ours, server.accept()[0]


@scenario
def busy_threads() -> None:
    """Threads that nearly always hold locks while the monitor process is forked."""
    stop = threading.Event()
    threading.Thread(target=_log, args=(stop,), daemon=True).start()
    for work in (_allocate, _import):
        threading.Thread(target=work, args=(stop,), daemon=True).start()

    @wrapped()
    def train(call: CallWrapper) -> int:
        return rank()

    for _ in range(20):
        train()
    stop.set()


def _log(stop: threading.Event) -> None:
    handler = logging.StreamHandler(open(os.devnull, "w"))  # noqa: SIM115
    logging.getLogger().addHandler(handler)
    while not stop.is_set():
        with handler.lock:  # type: ignore[union-attr]
            logging.getLogger("user").warning("held")
            time.sleep(0.001)


def _allocate(stop: threading.Event) -> None:
    while not stop.is_set():
        [bytearray(100_000) for _ in range(100)]


def _import(stop: threading.Event) -> None:
    import colorsys
    import importlib

    while not stop.is_set():
        importlib.reload(colorsys)


@scenario
def destroys_its_groups() -> None:
    """Each call ends with an orderly destruction, and has a model that refers to the group."""

    @Wrapper(soft_timeout=seconds(20), hard_timeout=seconds(25))
    def train() -> None:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        for _ in range(10):
            model(torch.ones(2, 4)).sum().backward()
        dist.all_gather_object([None] * dist.get_world_size(), {"a": rank()})
        dist.barrier()
        dist.destroy_process_group()

    for _ in range(30):
        train()


if __name__ == "__main__":
    main()
