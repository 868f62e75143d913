"""Barriers and view changes with many members on one real store, and their store operations; and
restarts of many real ranks (`many_ranks.py`).

A member is a thread with its own connection. It runs the real state machine of the restart, without
the training function and other rank-local work. The server is a separate process. The number of
operations on a member's connection must not grow with the number of members. The bytes do: the
list of arrived members is read as one value.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.inprocess import many_ranks
from benchmarks.lib.members import CountedStore, Member, connected
from benchmarks.lib.rank_processes import RankProcesses, serve, store
from benchmarks.lib.sheets import Sheet, median, ms
from outlast.coordination import barrier
from outlast.coordination.ops import Link, perform_on
from outlast.coordination.ops import run as run_to_end

__all__ = ["run", "sheets"]

SERVER = -1
PATIENCE_S = 300.0
SETTLE_S = 0.2
"""Time for the last member to wait at the store after it has entered."""


def run(quick: bool) -> dict[str, Any]:
    """Measures with increasing numbers of members."""
    sizes = (4, 16) if quick else (4, 64, 512)
    real = {
        "restarts": {str(n): many_ranks.restarts(n, 3) for n in ((4,) if quick else (64, 128))},
        "groups": {
            str(n): many_ranks.groups(n, 2 if quick else 5)
            for n in ((2, 4) if quick else (8, 16, 32, 64, 128))
        },
    }
    return {str(size): _measure(size, 3 if quick else 5) for size in sizes} | {"real": real}


def _measure(size: int, rounds: int) -> dict[str, Any]:
    print(f"scale: {size} members", flush=True)
    with RankProcesses("scale", 1) as processes:
        processes.start(SERVER, lambda: serve(processes.port))
        store(processes.port)  # torch's client waits until the server listens
        with ThreadPoolExecutor(64) as pool:
            made = pool.map(lambda _: connected(processes.port), range(size))
            stores = [CountedStore(one) for one in made]
        return {
            "barrier": _barriers(stores, rounds),
            "view change": view_changes(stores, rounds),
        }


def _barriers(stores: list[CountedStore], rounds: int) -> dict[str, Any]:
    """Seconds from the release of all members until the last one has passed the barrier."""
    expected = frozenset(range(len(stores)))
    together = threading.Barrier(len(stores))
    starts: list[float] = [0.0] * len(stores)
    ends: list[float] = [0.0] * len(stores)
    seconds = []

    async def pass_one(link: Link, name: str, member: int) -> None:
        await barrier.arrive(link, name, member, expected, rank=member, world_size=len(stores))
        await link.wait_for(barrier.done_key(name), PATIENCE_S)

    def member(number: int) -> None:
        link = Link(perform=perform_on(stores[number]))
        for trial in range(rounds):
            together.wait()
            starts[number] = time.monotonic()
            run_to_end(pass_one(link, f"barrier/{trial}", number))
            ends[number] = time.monotonic()
            if together.wait() == 0:
                seconds.append(max(ends) - min(starts))

    counts = _counted(stores, lambda: _in_threads(len(stores), member))
    return {"seconds": seconds, **_per_member(counts, rounds)}


def view_changes(stores: list[CountedStore], restarts: int) -> dict[str, Any]:
    """Seconds from a fault on one member until the last member is back in the function."""
    members: list[Member] = []

    def all_in(iteration: int) -> None:
        while not all(iteration in m.entered for m in members):
            time.sleep(0.005)
        time.sleep(SETTLE_S)

    members.extend(Member(n, len(stores), restarts, all_in) for n in range(len(stores)))

    def member(number: int) -> None:
        members[number].run(stores[number])

    # Joining and leaving are not part of a view change: the members take the counts in between.
    _in_threads(len(stores), member, lambda number: members[number].counted(stores[number]))
    seconds = []
    for iteration in range(restarts):
        fault = max(m.failed.get(iteration, 0.0) for m in members)
        seconds.append(max(m.entered[iteration + 1] for m in members) - fault)
    return {"seconds": seconds, **_per_member([m.between() for m in members], restarts)}


def _in_threads(
    size: int, work: Callable[[int], None], prepare: Callable[[int], None] | None = None
) -> None:
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as e:  # noqa: BLE001 - raised in the calling thread
            errors.append(e)

    if prepare is not None:
        for number in range(size):
            prepare(number)
    threads = [threading.Thread(target=guarded, args=(n,), daemon=True) for n in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE_S
    for thread in threads:
        while thread.is_alive() and not errors and time.monotonic() < deadline:
            thread.join(0.2)
    if errors:
        raise errors[0]
    if time.monotonic() >= deadline:
        raise RuntimeError(f"{size} members did not finish within {PATIENCE_S} s")


def _counted(stores: list[CountedStore], work: Callable[[], None]) -> list[tuple[int, int]]:
    before = [s.total() for s in stores]
    work()
    after = [s.total() for s in stores]
    return [(now[0] - then[0], now[1] - then[1]) for then, now in zip(before, after, strict=True)]


def _per_member(counts: list[tuple[int, int]], rounds: int) -> dict[str, float]:
    operations = [count / rounds for count, _ in counts]
    return {
        "operations": statistics.fmean(operations),
        "most": max(operations),
        "bytes": statistics.fmean(size / rounds for _, size in counts),
    }


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The tables of the results."""
    rows = []
    for what in ("barrier", "view change"):
        for size, found in data.items():
            if size == "real":
                continue
            one = found[what]
            rows.append(
                (
                    what,
                    size,
                    ms(median(one["seconds"])),
                    f"{1e3 * (median(one['seconds']) or 0.0) / int(size):.2f}",
                    f"{one['operations']:.1f}",
                    f"{one['most']:.1f}",
                    f"{one['bytes'] / 1024:.1f}",
                )
            )
    return [
        Sheet(
            "Members against one store, on one machine",
            ("what", "members", "ms", "ms/member", "ops/member", "most", "KiB read/member"),
            rows,
            "A view change is a whole recovery: from a fault on one member, over two barriers and "
            "the agreement on the next view, to the last member's entry. All members share the "
            "cores of one machine, and one interpreter.",
        ),
        *(many_ranks.sheets(data["real"]) if "real" in data else ()),
    ]
