"""The arrangement of ranks in a topology tree: pure functions behind `rank_tree.Tree`.

A rank is a leaf; its path is its group in each layer, from the root down. All functions depend on
their arguments only, so that every rank computes the same arrangement.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

Path = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LayerRule:
    """The rule of one layer, for each of its groups."""

    min_ranks: int
    max_ranks: int | None
    reserve: bool
    backfill: bool


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """The ranks of one iteration.

    Attributes:
        paths: the path of each rank. The first `active` ranks are active.
        active: the number of active ranks.
        before: for each rank, what the rank was before (its place in the arguments).
        why: for each former rank that a layer discards, the reason.
    """

    paths: tuple[Path, ...]
    active: int
    before: tuple[int, ...] = ()
    why: Mapping[int, str] = dataclasses.field(default_factory=dict)


class _Leaf:
    def __init__(self, before: int, path: Path, active: int | None, healthy: bool) -> None:
        self.before, self.path, self.active, self.healthy = before, path, active, healthy

    def groups(self) -> Iterable[Path]:
        """The groups of this leaf, from the innermost to the root."""
        return (self.path[:depth] for depth in range(len(self.path), 0, -1))


def first_arrangement(
    paths: Mapping[int, Path],
    rules: Sequence[LayerRule],
    size_filter: Callable[[int], int] | None = None,
    terminated: Collection[int] = (),
) -> Arrangement:
    """The arrangement at the start of a job: `paths` of the ranks that the launcher gave.

    Ranks become active in depth-first order, with groups in the order of their first rank, as long
    as no group exceeds the `max_ranks` of its layer. Then `terminated` ranks are replaced.
    """
    order = _depth_first([(rank, paths[rank]) for rank in sorted(paths)])
    counts: collections.Counter[Path] = collections.Counter()
    leaves, active = [], 0
    for rank in order:
        leaf = _Leaf(rank, paths[rank], None, rank not in terminated)
        if _allowed(leaf, rules, counts):
            leaf.active = active
            counts.update(leaf.groups())
            active += 1
        leaves.append(leaf)
    return _settle(leaves, active, rules, size_filter)


def next_arrangement(
    last: Arrangement,
    paths: Mapping[int, Path],
    newcomers: Collection[int],
    rules: Sequence[LayerRule],
    size_filter: Callable[[int], int] | None = None,
) -> Arrangement:
    """The arrangement after `last`.

    Args:
        last: the arrangement before, or the first one.
        paths: the paths of the present ranks, by their rank before. Other ranks are terminated.
        newcomers: those of `paths` that are new processes. One that has the path of the process
            whose rank it takes continues in its place; another one is inactive at first.
        rules: of the layers, from the root down.
        size_filter: reduces the number of active ranks.
    """
    leaves, arrived = [], []
    for rank, path in enumerate(last.paths):
        active = rank if rank < last.active else None
        takes_place = rank not in newcomers or paths.get(rank) == path
        leaves.append(_Leaf(rank, path, active, rank in paths and takes_place))
        if not takes_place:
            arrived.append(rank)
    arrived += [rank for rank in sorted(paths) if rank >= len(last.paths)]
    leaves += [_Leaf(rank, paths[rank], None, True) for rank in arrived]
    grow = bool(newcomers) or bool(arrived)
    return _settle(leaves, last.active, rules, size_filter, grow=grow)


def _settle(
    leaves: list[_Leaf],
    active: int,
    rules: Sequence[LayerRule],
    size_filter: Callable[[int], int] | None,
    *,
    grow: bool = False,
) -> Arrangement:
    """Replaces the active ranks that are gone, and numbers the rest."""
    why = _discard(leaves, rules)
    unreplaced = _replace(leaves, rules)
    active -= len(unreplaced)
    _backfill(leaves, unreplaced, rules)
    _shift(leaves)
    if grow:
        active = _activate_more(leaves, active, rules)
    wanted = active if size_filter is None else size_filter(active)
    if not 0 <= wanted <= active:
        raise ValueError(f"world_size_filter({active}) returned {wanted}: at most {active} allowed")
    healthy = [leaf for leaf in leaves if leaf.healthy]
    places = {leaf.active: leaf for leaf in healthy if leaf.active is not None}
    reserve = [leaf for leaf in healthy if leaf.active is None]
    order = [places[rank] for rank in range(wanted)] + reserve
    order += [places[rank] for rank in range(wanted, active)]  # in reserve from now on
    return Arrangement(
        tuple(leaf.path for leaf in order), wanted, tuple(leaf.before for leaf in order), why
    )


def _depth_first(ranks: list[tuple[int, Path]]) -> list[int]:
    if not ranks or not ranks[0][1]:
        return [rank for rank, _ in ranks]
    groups: dict[str, list[tuple[int, Path]]] = {}
    for rank, path in ranks:
        groups.setdefault(path[0], []).append((rank, path[1:]))
    return [rank for group in groups.values() for rank in _depth_first(group)]


def _allowed(leaf: _Leaf, rules: Sequence[LayerRule], counts: Mapping[Path, int]) -> bool:
    """Whether every group of the leaf may have one more active rank."""
    limits = ((group, rules[len(group) - 1].max_ranks) for group in leaf.groups())
    return all(limit is None or counts.get(group, 0) < limit for group, limit in limits)


def _discard(leaves: list[_Leaf], rules: Sequence[LayerRule]) -> dict[int, str]:
    """Discards every group with fewer healthy ranks than `min_ranks`: the inner groups first, which
    count for the outer ones. Returns the reasons.
    """
    why: dict[int, str] = {}
    for depth in range(len(rules), 0, -1):
        groups: dict[Path, list[_Leaf]] = {}
        for leaf in leaves:
            if leaf.healthy:
                groups.setdefault(leaf.path[:depth], []).append(leaf)
        least = rules[depth - 1].min_ranks
        for group, members in groups.items():
            if len(members) >= least:
                continue
            for leaf in members:
                leaf.healthy = False
                why[leaf.before] = (
                    f"its group {group[-1]!r} in layer {depth - 1} of the tree has {len(members)} "
                    f"healthy ranks, fewer than min_ranks={least}"
                )
    return why


def _replace(leaves: list[_Leaf], rules: Sequence[LayerRule]) -> list[_Leaf]:
    """Gives the place of each active rank that is gone to the last inactive rank of its innermost
    group that has one, as far up as the layers are marked RESERVE. Returns those not replaced.
    """
    pools: dict[Path, list[_Leaf]] = {}
    for leaf in leaves:
        if leaf.healthy and leaf.active is None:
            for group in leaf.groups():
                pools.setdefault(group, []).append(leaf)
    unreplaced = []
    for lost in _active(leaves, healthy=False):
        replacement = None
        for group in lost.groups():
            if not rules[len(group) - 1].reserve:
                break
            pool = pools.get(group, [])
            while pool and pool[-1].active is not None:  # taken by way of another group
                pool.pop()
            if pool:
                replacement = pool.pop()
                break
        if replacement is None:
            unreplaced.append(lost)
        else:
            replacement.active, lost.active = lost.active, None
    return unreplaced


def _backfill(leaves: list[_Leaf], unreplaced: list[_Leaf], rules: Sequence[LayerRule]) -> None:
    """Moves the highest active ranks of each domain into its gaps.

    The domain of a rank is its outermost group that is reached by layers marked BACKFILL alone.
    """
    domains: dict[Path, list[_Leaf]] = {}
    for lost in unreplaced:
        domain: Path = ()
        for group in lost.groups():
            if not rules[len(group) - 1].backfill:
                break
            domain = group
        if domain:
            domains.setdefault(domain, []).append(lost)
    for domain, missing in domains.items():
        active = [leaf for leaf in _active(leaves) if leaf.path[: len(domain)] == domain]
        for leaf, lost in zip(active[-len(missing) :], missing, strict=False):
            leaf.active = lost.active


def _shift(leaves: list[_Leaf]) -> None:
    """Closes the remaining gaps: each active rank is lowered by the number of gaps below it."""
    for rank, leaf in enumerate(_active(leaves)):
        leaf.active = rank


def _active(leaves: list[_Leaf], *, healthy: bool = True) -> list[_Leaf]:
    """The healthy (or gone) leaves with an active rank, in the order of that rank."""
    found = [x for x in leaves if x.healthy == healthy and x.active is not None]
    return sorted(found, key=lambda leaf: leaf.active or 0)


def _activate_more(leaves: list[_Leaf], active: int, rules: Sequence[LayerRule]) -> int:
    """Activates inactive ranks as far as the layers allow; returns the number of active ranks."""
    counts: collections.Counter[Path] = collections.Counter()
    for leaf in _active(leaves):
        counts.update(leaf.groups())
    for leaf in leaves:
        if leaf.healthy and leaf.active is None and _allowed(leaf, rules, counts):
            leaf.active = active
            counts.update(leaf.groups())
            active += 1
    return active
