"""Many restarts in a row; rank 0 counts the resources of the process after each."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from typing import Any

import psutil
import torch.distributed as dist
from rank import main, report, say, scenario
from rank_actions import finish, join_group, rank

from outlast.inprocess import CallWrapper, Wrapper


def _native_threads(earlier: int | None) -> int:
    """How many threads the kernel has, once these are no more than `earlier`, or after 15 s.

    A Python thread that was joined still has to leave the kernel, which takes it a while on a busy
    machine, and no event says that it has.
    """
    deadline = time.monotonic() + 15
    while (count := len(os.listdir("/proc/self/task"))) > (earlier or count):
        if time.monotonic() > deadline:
            break
        time.sleep(0.001)
    return count


def _held(earlier: int | None = None) -> dict[str, Any]:
    """The resources of the process after the previous iteration was released."""
    for thread in threading.enumerate():
        if thread.name == "outlast-release":
            thread.join()
    gc.collect()
    handlers = [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())]
    return {
        "threads": sorted(t.name for t in threading.enumerate()),
        "native_threads": _native_threads(earlier),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": len(psutil.Process().children(recursive=True)),
        "handlers": hash(tuple(handlers)),
        "resident": psutil.Process().memory_info().rss,
    }


@scenario
def many_restarts() -> None:
    restarts = int(sys.argv[2])
    earlier: int | None = None

    @Wrapper(repeated_faults=None)
    def train(call: CallWrapper) -> int:
        nonlocal earlier
        join_group()
        if call.iteration in (10, restarts // 2, restarts):
            # Between two barriers: the other rank's connections exist, and stay open.
            dist.barrier()
            held = _held(earlier)
            say("held", iteration=call.iteration, **held)
            earlier = held["native_threads"]
            dist.barrier()
        if call.iteration < restarts:
            if rank() == call.iteration % 2:
                raise ValueError("a planned fault")
            dist.barrier()
        return finish()

    handler, before = signal.getsignal(signal.SIGURG), _held()
    report(train)  # type: ignore[call-arg]
    after = _held()
    say(
        "ended",
        threads=[before["threads"], after["threads"]],
        descriptors=[before["descriptors"], after["descriptors"]],
        children=after["children"],
        handler=signal.getsignal(signal.SIGURG) == handler,
    )


if __name__ == "__main__":
    main()
