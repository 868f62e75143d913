"""Barriers and view changes with many members against one real store, and what each asks of it.

A member is a thread with a connection of its own, and runs the real state machine of the restart;
only the function, and what else is rank-local, is left out. The server is a process of its own.
The number of operations is what goes over a member's connection. It must not grow with the number
of members. Bytes do: who has arrived is read as one value.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.lib.members import CountedStore, Member
from benchmarks.lib.rank_processes import Crew, serve, store
from benchmarks.lib.sheets import Sheet, median, ms
from outlast.coordination import Link, TorchStore, barrier, drive, perform_on

__all__ = ["run", "sheets"]

SERVER = -1
PATIENCE_S = 300.0
SETTLE_S = 0.2
"""Until the last member that has entered waits at the store."""


def run(quick: bool) -> dict[str, Any]:
    """Measures for growing numbers of members."""
    sizes = (4, 16) if quick else (4, 64, 512)
    return {str(size): _measure(size, 3 if quick else 5) for size in sizes}


def _measure(size: int, rounds: int) -> dict[str, Any]:
    print(f"scale: {size} members", flush=True)
    with Crew("scale", 1) as crew:
        crew.start(SERVER, lambda: serve(crew.port))
        # Side by side: torch asks for the peer's name at each connection, and some resolvers are
        # slow to say that there is none.
        with ThreadPoolExecutor(64) as pool:
            made = pool.map(lambda _: store(crew.port), range(size))
            stores = [CountedStore(one) for one in made]
        return {
            "barrier": _barriers(stores, rounds),
            "view change": _view_changes(stores, rounds),
        }


def _barriers(stores: list[CountedStore], rounds: int) -> dict[str, Any]:
    """From the moment all are let go until the last is through."""
    expected = frozenset(range(len(stores)))
    together = threading.Barrier(len(stores))
    starts: list[float] = [0.0] * len(stores)
    ends: list[float] = [0.0] * len(stores)
    seconds = []

    async def pass_one(link: Link, name: str, member: int) -> None:
        await barrier.arrive(link, name, member, expected, rank=member, world_size=len(stores))
        await link.wait_for(barrier.done_key(name), PATIENCE_S)

    def member(number: int) -> None:
        perform = perform_on(TorchStore(stores[number], "the store"))
        for trial in range(rounds):
            together.wait()
            starts[number] = time.monotonic()
            drive(pass_one(Link(), f"barrier/{trial}", number), perform)
            ends[number] = time.monotonic()
            if together.wait() == 0:
                seconds.append(max(ends) - min(starts))

    counts = _counted(stores, lambda: _in_threads(len(stores), member))
    return {"seconds": seconds, **_per_member(counts, rounds)}


def _view_changes(stores: list[CountedStore], restarts: int) -> dict[str, Any]:
    """From a fault on one member until the last one is back, by the real state machine."""
    members: list[Member] = []

    def all_in(iteration: int) -> None:
        while not all(iteration in m.entered for m in members):
            time.sleep(0.005)
        time.sleep(SETTLE_S)

    members.extend(Member(n, len(stores), restarts, all_in) for n in range(len(stores)))

    def member(number: int) -> None:
        members[number].run(TorchStore(stores[number], "the store"))

    # Coming in and going out are not part of a view change: the snapshots are taken by the members.
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
        except BaseException as e:  # noqa: BLE001 - raised in the thread that asked
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
        raise RuntimeError(f"{size} members were not done within {PATIENCE_S} s")


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
    """The tables."""
    rows = []
    for what in ("barrier", "view change"):
        for size, found in data.items():
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
        )
    ]
