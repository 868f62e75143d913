"""Background calls of several ranks. The first argument of each scenario is the process kind."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ranks import RANK, WORLD_SIZE, join_group, leave_group, main, meet, raising, say, scenario
from torch.distributed import distributed_c10d

from async_checkpoint.calls import work
from async_checkpoint.calls.work import Gate
from outlast.async_checkpoint import AsyncCallsQueue, AsyncRequest, DistributedAsyncCaller


def queue_of(kind: str, **options: object) -> AsyncCallsQueue:
    # Normal priority: other work on this machine would delay the test.
    return AsyncCallsQueue(kind == "persistent", nice=0, **options)  # type: ignore[arg-type]


@contextlib.contextmanager
def queue_in_group(kind: str, **options: object) -> Iterator[AsyncCallsQueue]:
    """A queue in a process group. Nothing is closed when a scenario fails: its process ends."""
    join_group()
    queue = queue_of(kind, **options)
    yield queue
    queue.close()
    leave_group()


def ends(queue: AsyncCallsQueue, calls: int = 1) -> None:
    """Waits for this many calls to end, and prints their outcomes."""
    for _ in range(calls):
        raising(lambda: queue.maybe_finalize_async_calls(blocking=True))


def finalize(index: int) -> None:
    say("finalized", index=index)


def gated(folder: str, index: int) -> AsyncRequest:
    """Rank 1 waits at a gate; the others are done at once."""
    then = [functools.partial(finalize, index)]
    gate = Gate(Path(folder)) if RANK == 1 else None
    return AsyncRequest(work.part, (gate,), then)


def at_once(index: int) -> AsyncRequest:
    return AsyncRequest(work.part, (None,), [functools.partial(finalize, index)])


@scenario
def goes_well(kind: str, folder: str, store: str = "") -> None:
    join_group(store)
    with queue_of(kind) as queue:
        queue.schedule_async_request(gated(folder, 0))
        queue.schedule_async_request(at_once(1))
        say("looked", done=queue.maybe_finalize_async_calls())
        say("done", done=queue.maybe_finalize_async_calls(blocking=True))
    leave_group()


@scenario
def one_fails(kind: str, how: str) -> None:
    with queue_in_group(kind) as queue:
        then = [functools.partial(finalize, 0)]
        queue.schedule_async_request(
            AsyncRequest(work.end_by, (how if RANK == 1 else "exit 0",), then)
        )
        queue.schedule_async_request(at_once(1))
        ends(queue, 2)


@scenario
def different_order(kind: str) -> None:
    with queue_in_group(kind) as queue:
        requests = [AsyncRequest(work.part, (None,), [functools.partial(finalize, 0)])]
        requests.insert(RANK, AsyncRequest(work.other_part, (), [functools.partial(finalize, 1)]))
        for request in requests:
            raising(lambda request=request: queue.schedule_async_request(request))
        queue.schedule_async_request(at_once(2))
        ends(queue, 3)


@scenario
def one_cannot_schedule(kind: str) -> None:
    with queue_in_group(kind) as queue:
        argument = (lambda: None) if RANK == 1 else None
        request = AsyncRequest(work.takes, (argument,), [functools.partial(finalize, 0)])
        raising(lambda: queue.schedule_async_request(request))
        queue.schedule_async_request(at_once(1))
        ends(queue, 2)


@scenario
def finalize_fails_on_one(kind: str) -> None:
    with queue_in_group(kind) as queue:

        def one_fails() -> None:
            if RANK == 1:
                raise OSError("the link is there already")
            finalize(0)

        queue.schedule_async_request(AsyncRequest(work.part, (None,), [one_fails]))
        queue.schedule_async_request(at_once(1))
        ends(queue, 2)


@scenario
def main_is_killed(kind: str, folder: str) -> None:
    join_group()
    queue = queue_of(kind)
    queue.schedule_async_request(gated(folder, 0))
    say("scheduled")
    ends(queue)


@scenario
def aborts(kind: str, folder: str) -> None:
    join_group()
    queue = queue_of(kind)
    queue.schedule_async_request(gated(folder, 0))
    if RANK == 0:
        say("scheduled")
        Gate(Path(folder), "abort").wait_in_call()
        queue.abort()
        say("aborted")
    else:
        ends(queue)
        queue.abort()
    leave_group()


@scenario
def store_is_lost(kind: str, folder: str) -> None:
    """Rank 0 serves the store."""
    join_group()
    queue = queue_of(kind)
    queue.schedule_async_request(gated(folder, 0))
    say("scheduled")
    ends(queue)
    raising(lambda: queue.maybe_finalize_async_calls())
    queue.abort()
    os._exit(0)  # the group has lost a rank: no orderly shutdown is possible


@scenario
def closes_in_time(kind: str, folder: str) -> None:
    join_group()
    queue = queue_of(kind)
    queue.schedule_async_request(at_once(0))
    queue.schedule_async_request(gated(folder, 1))
    raising(lambda: queue.close(timeout=datetime.timedelta(seconds=0.05)))
    leave_group()


@scenario
def in_step(kind: str, folder: str) -> None:
    """Training steps, each with a collective and a check; rank 1's part ends at some step."""
    with queue_in_group(kind, max_unfinalized=2) as queue:
        queue.schedule_async_request(gated(folder, 0))
        queue.schedule_async_request(at_once(1))
        step = 0
        while queue.get_num_unfinalized_calls():
            done = queue.maybe_finalize_async_calls(no_dist=False)
            if done or step == 0:
                say("check", step=step, done=done)
            step += 1
            meet()


@scenario
def uneven(kind: str) -> None:
    """Ranks with nothing to do, and ranks that check at different times."""
    with queue_in_group(kind, max_unfinalized=1) as queue:
        for index in range(4):
            fn = work.part if index % 2 == RANK else None
            args = (None,) if fn else ()
            queue.schedule_async_request(
                AsyncRequest(fn, args, [functools.partial(finalize, index)])
            )
            if RANK == 1:
                queue.maybe_finalize_async_calls()


@scenario
def leaves_no_keys(kind: str) -> None:
    join_group()
    store = distributed_c10d._get_process_group_store(distributed_c10d._get_default_group())
    meet()
    before = store.num_keys()
    for how in ("exit 0", "exit"):
        queue = queue_of(kind)
        for _ in range(3):
            queue.schedule_async_request(AsyncRequest(work.end_by, (how,), []))
        for _ in range(3):
            raising(lambda queue=queue: queue.maybe_finalize_async_calls(blocking=True))
        queue.close()
        meet()
    say("keys", before=before, after=store.num_keys())
    leave_group()


@scenario
def on_subgroups(kind: str) -> None:
    """Each rank is in two groups; their calls are independent."""
    join_group()
    pair = dist.new_group([0, 1])
    queues = [queue_of(kind), queue_of(kind)]
    if RANK < 2:
        queues.append(queue_of(kind, group=pair))
    for index, queue in enumerate(queues):
        how = "exit" if index == 1 and RANK == 2 else "exit 0"
        queue.schedule_async_request(AsyncRequest(work.end_by, (how,), []))
    for queue in queues:
        raising(lambda queue=queue: queue.maybe_finalize_async_calls(blocking=True))
        queue.close()
    leave_group()


@scenario
def with_a_caller(kind: str, folder: str) -> None:
    join_group()
    caller = DistributedAsyncCaller(kind == "persistent", nice=0)
    gate = Gate(Path(folder)) if RANK == 1 else None
    caller.schedule_async_call(work.part, (gate,))
    if RANK == 0:
        say("own", done=caller.is_current_async_call_done(blocking=True))
        caller.schedule_async_call(work.part, (None,))
    say("all", done=caller.is_current_async_call_done(no_dist=False))
    say("all", done=caller.is_current_async_call_done(blocking=True, no_dist=False))
    caller.schedule_async_call(work.end_by, ("exit" if RANK == 1 else "exit 0",))
    raising(lambda: caller.is_current_async_call_done(blocking=True, no_dist=False))
    raising(lambda: caller.is_current_async_call_done(no_dist=False))
    caller.close()
    leave_group()


@scenario
def in_the_foreground(how: str) -> None:
    join_group()
    own = how if RANK == 1 else "exit 0"
    request = AsyncRequest(foreground, (), [functools.partial(finalize, 0)], {"how": own})
    raising(request.execute_sync)
    leave_group()


def foreground(how: str) -> None:
    if how == "exception":
        work.end_by(how)


@scenario
def many_groups(kind: str) -> None:
    """Recreated groups and their queues: numbers restart, and calls are not confused."""
    stores: Any = dist
    server = stores.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), WORLD_SIZE, is_master=RANK == 0
    )
    for attempt in range(3):
        store = stores.PrefixStore(str(attempt), server)
        dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD_SIZE)
        with queue_of(kind) as queue:
            queue.schedule_async_request(AsyncRequest(None, (), [lambda: say("finalized")]))
        leave_group()
    server.add("left", 1)
    while RANK == 0 and server.add("left", 0) < WORLD_SIZE:
        time.sleep(0.01)  # it serves the store until all have left


@scenario
def of_this_program(kind: str) -> None:
    """The function is defined in the program that the rank runs."""
    with queue_in_group(kind) as queue:
        queue.schedule_async_request(AsyncRequest(defined_here, (RANK,), []))


def defined_here(rank: int) -> None:
    say("worked", rank=rank, name=__name__)


if __name__ == "__main__":
    main()
