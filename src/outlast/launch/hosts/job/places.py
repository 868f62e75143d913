"""The places of hosts: which host has which ranks. Pure functions.

Place p has the ranks from p * nproc on, so the ranks of one host are consecutive. More hosts than
places are spares, and wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from outlast.coordination.replicated.hosts import HostInfo


class PlaceConflict(Exception):
    """Two hosts ask for one place, or one asks for a place that does not exist."""


def assign(
    before: Sequence[str], hosts: Sequence[HostInfo], maximum: int, *, asked: bool = False
) -> tuple[str, ...]:
    """The id of the host at each place, for at most `maximum` places.

    A host that had a place before keeps it if that still exists, and comes before hosts that had
    none, so that survivors keep their ranks and are never replaced by spares. The others take the
    free places in the order of `hosts`.

    Args:
        before: the host at each place of the attempt before.
        hosts: the hosts that are there, in the order in which they joined.
        maximum: the number of places.
        asked: whether each host has the place that it asks for (`--node-rank`).

    Raises:
        PlaceConflict: naming the hosts and the place; with `asked` only.
    """
    if asked:
        return _as_asked(hosts, maximum)
    there = [host.id for host in hosts]
    chosen = [host for host in before if host in there]
    chosen += [host for host in there if host not in before]
    del chosen[maximum:]
    places: list[str] = [""] * len(chosen)
    for place, host in enumerate(before[: len(places)]):
        if host in chosen:
            places[place] = host
    waiting = iter([host for host in chosen if host not in places])
    return tuple(host or next(waiting) for host in places)


def _as_asked(hosts: Sequence[HostInfo], maximum: int) -> tuple[str, ...]:
    holders: dict[int, HostInfo] = {}
    for host in hosts:
        if not 0 <= host.place < maximum:
            raise PlaceConflict(
                f"host {host.name} has --node-rank {host.place}, and --nnodes is {maximum}"
            )
        first = holders.setdefault(host.place, host)
        if first is not host:
            raise PlaceConflict(
                f"hosts {first.name} and {host.name} both have --node-rank {host.place}"
            )
    return tuple(holders[place].id for place in sorted(holders))
