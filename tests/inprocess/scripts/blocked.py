"""Rank 0 blocks in one way after another; rank 1 fails when rank 0 sleeps in the kernel."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rank import main, say, scenario, wrapped
from rank_actions import FOREVER_S, Told, finish, join_group, rank, wait_forever, wait_until_asleep

from outlast.inprocess import CallWrapper, State
from outlast.inprocess.abort import Abort

Block = Callable[[], object]


def _socket_recv(call: CallWrapper) -> Block:
    pair = socket.socketpair()
    return lambda: pair[0].recv(1)


def _lock(call: CallWrapper) -> Block:
    lock = threading.Lock()
    lock.acquire()
    return lock.acquire


def _all_reduce(call: CallWrapper) -> Block:
    join_group()
    return lambda: dist.all_reduce(torch.ones(1))


def _sub_group(call: CallWrapper) -> Block:
    join_group()
    group = dist.new_group([0, 1])
    return lambda: dist.all_reduce(torch.ones(1), group=group)


def _receive(call: CallWrapper) -> Block:
    join_group()
    return lambda: dist.recv(torch.ones(1), src=1)


def _backward(call: CallWrapper) -> Block:
    join_group()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    return lambda: (model, loss.backward())  # the model owns the reducer


def _store_wait(call: CallWrapper) -> Block:
    store = call.state.store
    return lambda: store.wait(["never"])


# What both ranks do first; rank 0 then blocks in the result.
WAYS: dict[str, Callable[[CallWrapper], Block]] = {
    "time.sleep": lambda call: lambda: time.sleep(FOREVER_S),
    "queue.get": lambda call: queue.Queue().get,
    "SimpleQueue.get": lambda call: queue.SimpleQueue().get,
    "Event.wait": lambda call: threading.Event().wait,
    "Event.wait with a timeout": lambda call: lambda: threading.Event().wait(FOREVER_S),
    "Lock.acquire": _lock,
    "socket.recv": _socket_recv,
    "store.wait": _store_wait,
    "init_process_group": lambda call: lambda: dist.init_process_group("gloo"),
    "all_reduce": _all_reduce,
    "all_reduce on a sub-group": _sub_group,
    "recv": _receive,
    "DDP backward": _backward,
}


@scenario
@wrapped()
def one_after_another(call: CallWrapper) -> list[str]:
    """One iteration for each way of blocking, and a last one."""
    ways = list(WAYS)
    if call.iteration == len(ways):
        return ways
    way = ways[call.iteration]
    # Separate connections: one of the ways blocks that of call.state.store.
    shared = call.state.store  # in torch 2.6, without `clone`
    store = shared.clone() if hasattr(shared, "clone") else dist.TCPStore(shared.host, shared.port)
    block = WAYS[way](call)
    if rank() == 1:
        store.wait(["asleep"])
        raise RuntimeError(f"a fault while the other is in {way}")
    say("blocks", way=way)
    threading.Thread(target=_tell, args=(store,), daemon=True).start()
    block()
    say("was not interrupted", way=way)
    return []


def _tell(store: dist.Store) -> None:
    wait_until_asleep()
    store.set("asleep", "1")


@scenario
@wrapped()
def amid_a_transfer(call: CallWrapper) -> int:
    """All ranks send and receive as much as they can; the test kills one."""
    size = join_group()
    data = torch.ones(1 << 22)
    step = 0
    while size == 3:
        dist.all_reduce(data)
        step += 1
        if step == 5:
            say("under way")
    return finish()


@scenario
@wrapped()
def amid_a_send(call: CallWrapper) -> int:
    """Rank 0 waits in its main thread for a send of which a part is written: rank 1 stops."""
    size = join_group()
    if size == 1:
        return finish()
    store, data = call.state.store, torch.ones(1 << 23)
    if rank() == 1:
        work = dist.irecv(data, 0)
        store.set("received", "1")
        os.kill(os.getpid(), signal.SIGSTOP)
        work.wait()
    store.wait(["received"])
    threading.Thread(target=_say_asleep, daemon=True).start()
    dist.isend(data, 1).wait()
    return -1


def _say_asleep() -> None:
    wait_until_asleep()
    say("asleep")


@scenario
@wrapped()
def peer_dies_before_it_connects(call: CallWrapper) -> int:
    """Rank 1 has published its address, and dies before a peer has connected."""
    if call.iteration == 0 and rank() == 1:
        say("waits")
        wait_forever()
    join_group()
    return finish()


@scenario
def atomic() -> None:
    """Rank 0 is in a nested atomic() when rank 1 fails; the test lets it continue."""
    told = Told()

    class Tells(Abort):
        def __call__(self, state: State) -> State:
            say("abort")
            return state

    @wrapped(abort=Tells())
    def train(call: CallWrapper) -> int:
        if call.iteration:
            return rank()
        store = call.state.store
        if rank() == 1:
            store.wait(["inside"])
            raise ValueError("a planned fault")
        with call.atomic():
            with call.atomic():
                store.set("inside", "1")
                told.wait()
                say("inner done")
            told.wait()  # still in the outer one
            say("outer done")
        try:
            with call.atomic():
                say("entered again")
        finally:
            say("refused")
        return -1

    train()


if __name__ == "__main__":
    main()
