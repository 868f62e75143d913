"""The least that a restart of Python ranks does, on this machine: the limit of `many_ranks`.

Each process has two threads, as a rank has: one sleeps in the function, the other waits for the end
of the iteration at torch's store. The process that fails sets that key. Each is woken by its
socket, sends the signal whose handler raises in its main thread, leaves the function, counts itself
at the store, and waits for the key that the last one sets: one round of all ranks, which keeps two
iterations apart. Then it enters the function again.

Left out is all that a restart does beyond that: a fault is not described, no connection is looked
for and shut down, no decision is made and no rank assigned, and nobody may be lost on the way. The
client is torch's, in C++.
"""

from __future__ import annotations

import contextlib
import datetime
import queue
import signal
import threading
import time
from typing import Any

from benchmarks.lib.rank_processes import RankProcesses, serve, store
from benchmarks.lib.timestamp_board import TimestampBoard

__all__ = ["floor"]

_PATIENCE_S = 100.0
_SETTLE_S = 0.2


class _Restart(BaseException):
    pass


def floor(size: int, faults: int) -> list[float]:
    """Seconds from a fault to the last process's entry into the function."""
    print(f"scale: the least of {size} ranks", flush=True)
    board = TimestampBoard(size, faults + 1)
    with RankProcesses("floor", size) as processes:
        processes.start(-1, lambda: serve(processes.port))
        processes.start_all(lambda slot: _rank(board, slot, faults, processes.port))
        processes.wait_all(_PATIENCE_S)
    found = []
    for iteration in range(faults):
        fault = board.fault(iteration)
        assert fault is not None
        found.append(max(board.row(iteration + 1)) - fault[0])
    return found


def _rank(board: TimestampBoard, slot: int, faults: int, port: int) -> None:
    signal.signal(signal.SIGURG, _raise)
    waits, own = store(port), store(port)
    for each in (waits, own):
        each.set_timeout(datetime.timedelta(seconds=_PATIENCE_S))
    main, keys = threading.get_ident(), queue.SimpleQueue[str]()
    threading.Thread(target=_watch, args=(waits, keys, main), daemon=True).start()
    for iteration in range(faults + 1):
        try:
            keys.put(f"over/{iteration}")
            _function(board, slot, iteration, faults)
            return
        except _Restart:
            pass
        except RuntimeError:
            with contextlib.suppress(_Restart):  # its own thread is woken, too
                own.set(f"over/{iteration}", "1")
                time.sleep(_PATIENCE_S)
        if own.add(f"left/{iteration}", 1) == board.slots:
            own.set(f"all/{iteration}", "1")
        own.wait([f"all/{iteration}"])


def _function(board: TimestampBoard, slot: int, iteration: int, faults: int) -> None:
    board.enter(iteration, slot, time.monotonic())
    if iteration == faults:
        return
    if slot == iteration % board.slots:
        while not board.all_entered(iteration):
            time.sleep(0.005)
        time.sleep(_SETTLE_S)
        board.fail(iteration, slot)
        raise RuntimeError("planned")
    time.sleep(_PATIENCE_S)


def _watch(waits: Any, keys: queue.SimpleQueue[str], main: int) -> None:
    while True:
        waits.wait([keys.get()])
        signal.pthread_kill(main, signal.SIGURG)


def _raise(number: int, frame: object) -> None:
    raise _Restart
