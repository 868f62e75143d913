"""Which host has which place: by its place before, by what it asks for, or by the network."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from outlast.coordination.replicated.hosts import HostInfo

_DIGITS = 20
"""Numbers are compared as texts of this length: those that another host sends may have any."""


class PlaceConflict(Exception):
    """Two hosts ask for one place, or one asks for a place that does not exist."""


def assign(
    before: Sequence[str], hosts: Iterable[HostInfo], maximum: int, *, asked: bool = False
) -> tuple[str, ...]:
    """The ID of the host at each place, for at most `maximum` places.

    Place p has the ranks from p * nproc on, so the ranks of one host are consecutive. More hosts
    than places are spares, and wait. A host that had a place before keeps it if that still exists,
    and comes before hosts that had none, so that survivors keep their ranks and are never replaced
    by spares. The others take the free places in the order of the network, and of
    `hosts` where that says nothing. A `PlaceConflict` naming the hosts and the place; with `asked`
    only.

    Args:
        before: the host at each place of the attempt before.
        asked: whether each host has the place that it asks for (`--node-rank`).
    """
    if asked:
        return _as_asked(hosts, maximum)
    there = [host.id for host in sorted(hosts, key=sort_key)]
    chosen = [host for host in before if host in there]
    chosen += [host for host in there if host not in before]
    del chosen[maximum:]
    places: list[str] = [""] * len(chosen)
    for place, host in enumerate(before[: len(places)]):
        if host in chosen:
            places[place] = host
    waiting = iter([host for host in chosen if host not in places])
    return tuple(host or next(waiting) for host in places)


def _as_asked(hosts: Iterable[HostInfo], maximum: int) -> tuple[str, ...]:
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


def sort_key(host: HostInfo) -> tuple[bool, list[str]]:
    """Orders hosts: `node9` comes before `node10`, and hosts of which nothing is known last."""
    levels = [re.sub("[0-9]+", lambda m: m[0].zfill(_DIGITS), level) for level in host.topology]
    return not levels, levels


def nearness(one: HostInfo, other: HostInfo) -> int:
    """How many levels of the network two hosts share."""
    pairs = zip(one.topology, other.topology, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def ranks_text(place: int, nproc: int) -> str:
    """The ranks of a place, in words."""
    first, last = place * nproc, (place + 1) * nproc - 1
    return f"rank {first}" if nproc == 1 else f"ranks {first} to {last}"
