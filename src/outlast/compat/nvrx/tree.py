"""`Tree`: a rank assignment that follows the topology of the job, with reserve ranks.

The ranks are the leaves of a tree whose inner nodes are groups, e.g. the hosts of a rack. Each
`Layer` says for its groups how many ranks they need, how many call the function, and where a
replacement for a lost rank may come from. A rank's path is its group in each layer, from the root
down. Arrangements depend on their arguments only, so that every rank computes the same one.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from outlast.compat.nvrx.state import from_core
from outlast.errors import RankDiscarded, RestartAbort
from outlast.inprocess.rank_assignment import RankAssignment, as_ranks
from outlast.inprocess.state import State, Status
from outlast.system.arguments import check_callable, check_int

__all__ = ["Layer", "LayerFlag", "Tree"]

Path = tuple[str, ...]


class LayerFlag(enum.Flag):
    """Where the place of a lost active rank may be filled from.

    * `RESERVE`: an inactive rank of the group takes its place.
    * `BACKFILL`: the highest active rank of the group takes its place.
    """

    RESERVE = enum.auto()
    BACKFILL = enum.auto()


@dataclasses.dataclass
class Layer:
    """The groups at one depth of the tree.

    Args:
        min_ranks: a group with fewer healthy ranks, active or not, leaves the job.
        max_ranks: how many ranks of a group are activated; `None` for no limit. A replacement from
            another group may exceed it.
        key_or_fn: the group of a rank: a value whose text is its key, or `fn(state)`, called on
            each rank with its own state.
        flag: see `LayerFlag`.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: Any = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        check_int("min_ranks", self.min_ranks, at_least=0)
        if self.max_ranks is not None:
            check_int("max_ranks", self.max_ranks, at_least=0)
        if self.flag is not None and not isinstance(self.flag, LayerFlag):
            raise TypeError(f"flag must be a LayerFlag or None, not {self.flag!r}")

    def key(self, state: State) -> str:
        fn = self.key_or_fn
        return str(fn(from_core(state)) if callable(fn) else fn)

    def allows(self, flag: LayerFlag) -> bool:
        return self.flag is not None and flag in self.flag


class Tree(RankAssignment):
    """Assigns and activates ranks by the topology of the job.

        rank_assignment = Tree(
            [
                Layer(min_ranks=128, max_ranks=256, flag=LayerFlag.RESERVE),  # the job: 256 run
                # A host that lost a GPU leaves the job.
                Layer(8, 8, lambda state: socket.gethostname(), LayerFlag.RESERVE),
            ]
        )

    *At the start*, ranks are activated in depth-first order, as long as no group exceeds the
    `max_ranks` of its layer; the others are a warm reserve. *After faults*, in this order:

    1. A group with fewer than `min_ranks` healthy ranks leaves the job, the inner groups first.
    2. The place of a lost active rank is taken by an inactive rank of its innermost group that has
       one, as far up as the layers are marked `RESERVE`.
    3. The remaining gaps in a group marked `BACKFILL` are filled by its highest active ranks. The
       group is the outermost one that is reached by marked layers alone.
    4. The gaps that are left are closed, as by `ShiftRanks`.
    5. `world_size_filter` may reduce the number of active ranks; the others join the reserve.

    A new process with the groups of the process whose rank it takes continues in its place. Another
    one is inactive at first; then inactive ranks are activated as far as `max_ranks` allows.

    `Tree` is composed with no assignment but `AwaitReplacements`, and needs no rank filter. Each
    rank computes its own keys. Outside a wrapped call, each computes those of all ranks.

    Args:
        layers: from the root down. All ranks have the same key in the first.
        world_size_filter: takes the number of active ranks, returns a number not above it.

    Raises:
        RankDiscarded: when called, if this rank's group leaves the job.
        RestartAbort: when called, if no rank is left that could be active.
        RuntimeError: when called, if the ranks have different keys in the first layer.
    """

    keeps_reserve = True

    def __init__(
        self, layers: Sequence[Layer], world_size_filter: Callable[[int], int] | None = None
    ) -> None:
        self.layers = list(layers)
        if not self.layers or not all(isinstance(layer, Layer) for layer in self.layers):
            raise TypeError(f"layers must be a list of at least one Layer, not {layers!r}")
        if world_size_filter is not None:
            check_callable("world_size_filter", world_size_filter)
        self.world_size_filter = world_size_filter
        self._last: Arrangement | None = None
        self._received: Mapping[int, str] | None = None
        self._own: Path | None = None

    def __repr__(self) -> str:
        return f"Tree({self.layers!r})"

    def prepare(self) -> None:
        self._last = self._received = self._own = None

    def publish(self, state: State, *, for_newcomers: bool) -> str | None:
        if self._own is None:  # kept, because a key may depend on the rank
            self._own = self._path(state)
        last = self._last if for_newcomers else None
        known = None if last is None else {"paths": last.paths, "active": last.active}
        mine = {"path": self._own, "new": self._last is None, "last": known}
        return json.dumps(mine, separators=(",", ":"))

    def receive(self, published: Mapping[int, str]) -> None:
        self._received = published

    def __call__(
        self, state: State, terminated_ranks: Collection[int]
    ) -> tuple[State, frozenset[int]]:
        gone = as_ranks(terminated_ranks)
        received, self._received = self._received, None
        arrangement = self._in_a_job(received) if received else self._outside(state, gone)
        self._last, size = arrangement, len(arrangement.paths)
        if state.rank not in arrangement.before:
            why = arrangement.why.get(state.rank, "it is one of the terminated ranks")
            raise RankDiscarded(
                f"rank {state.rank} (initial rank {state.initial_rank}) is left out of iteration "
                f"{state.iteration} by Tree: {why}"
            )
        if not arrangement.active:
            raise RestartAbort(
                f"rank {state.rank}: Tree: no rank can be active in iteration {state.iteration}: "
                f"{size} ranks are in reserve, but no layer lets one of them take a lost place"
            )
        rank, status = arrangement.before.index(state.rank), state.status
        if rank >= arrangement.active:
            status = Status.INACTIVE
        elif status is Status.INACTIVE:
            status = Status.INITIALIZED
        after = state.copy(
            rank=rank, world_size=size, active_world_size=arrangement.active, status=status
        )
        return after, frozenset()

    def _in_a_job(self, received: Mapping[int, str]) -> Arrangement:
        """The arrangement from what all ranks have published: the same on each."""
        values = {rank: json.loads(text) for rank, text in sorted(received.items())}
        paths: dict[int, Path] = {rank: tuple(value["path"]) for rank, value in values.items()}
        last = self._last
        newcomers = [rank for rank, value in values.items() if value["new"]]
        if len(newcomers) == len(values):
            return self._first(paths, ())
        if last is None:  # this is a newcomer
            known = next((v["last"] for v in values.values() if v["last"] is not None), None)
            if known is not None:
                last = Arrangement(tuple(map(tuple, known["paths"])), known["active"])
        if newcomers and not any(value["last"] for value in values.values()):
            return self._first(paths, ())  # every rank that was to tell the newcomers is lost
        assert last is not None
        return next_arrangement(last, paths, newcomers, self.layers, self.world_size_filter)

    def _outside(self, state: State, gone: Collection[int]) -> Arrangement:
        """Outside of a wrapped call: the keys of all ranks are computed here."""
        if self._last is not None and len(self._last.paths) == state.world_size:
            paths = {r: p for r, p in enumerate(self._last.paths) if r not in gone}
            return next_arrangement(self._last, paths, (), self.layers, self.world_size_filter)
        states = (state.copy(rank=r, initial_rank=r) for r in range(state.world_size))
        return self._first({each.rank: self._path(each) for each in states}, gone)

    def _first(self, paths: Mapping[int, Path], gone: Collection[int]) -> Arrangement:
        if len(roots := sorted({path[0] for path in paths.values()})) > 1:
            raise RuntimeError(f"Tree: all ranks must have one key in the first layer, not {roots}")
        arrangement = first_arrangement(paths, self.layers, self.world_size_filter, gone)
        active = arrangement.before[: arrangement.active]
        if not gone and list(active) != sorted(active):
            warnings.warn(
                "Tree: the ranks that the launcher gave are not in the order of the tree; the new "
                f"ranks 0, 1, ... were {list(active)}",
                UserWarning,
                stacklevel=3,
            )
        return arrangement

    def _path(self, state: State) -> Path:
        return tuple(layer.key(state) for layer in self.layers)


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """The paths of ranks, the first `active` of them active; what they were; why some are out."""

    paths: tuple[Path, ...]
    active: int
    before: tuple[int, ...] = ()
    why: Mapping[int, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class _Leaf:
    before: int
    path: Path
    active: int | None
    healthy: bool

    def groups(self) -> Iterable[Path]:
        """From the innermost to the root."""
        return (self.path[:depth] for depth in range(len(self.path), 0, -1))


def first_arrangement(
    paths: Mapping[int, Path],
    layers: Sequence[Layer],
    size_filter: Callable[[int], int] | None = None,
    terminated: Collection[int] = (),
) -> Arrangement:
    """The arrangement at the start: ranks become active in depth-first order, with groups in the
    order of their first rank. Then `terminated` ranks are replaced.
    """
    order = _depth_first([(rank, paths[rank]) for rank in sorted(paths)])
    leaves = [_Leaf(rank, paths[rank], None, True) for rank in order]
    active = _activate_more(leaves, 0, layers)
    for leaf in leaves:
        leaf.healthy = leaf.before not in terminated
    return _settle(leaves, active, layers, size_filter)


def next_arrangement(
    last: Arrangement,
    paths: Mapping[int, Path],
    newcomers: Collection[int],
    layers: Sequence[Layer],
    size_filter: Callable[[int], int] | None = None,
) -> Arrangement:
    """The arrangement after `last`, of the ranks in `paths`; `newcomers` are new processes."""
    leaves, arrived = [], []
    for rank, path in enumerate(last.paths):
        active = rank if rank < last.active else None
        takes_place = rank not in newcomers or paths.get(rank) == path
        leaves.append(_Leaf(rank, path, active, rank in paths and takes_place))
        if not takes_place:
            arrived.append(rank)
    arrived += [rank for rank in sorted(paths) if rank >= len(last.paths)]
    leaves += [_Leaf(rank, paths[rank], None, True) for rank in arrived]
    grow = bool(newcomers or arrived)
    return _settle(leaves, last.active, layers, size_filter, grow=grow)


def _settle(
    leaves: list[_Leaf],
    active: int,
    layers: Sequence[Layer],
    size_filter: Callable[[int], int] | None,
    *,
    grow: bool = False,
) -> Arrangement:
    """Replaces the active ranks that are gone, and numbers the rest."""
    why = _discard(leaves, layers)
    unreplaced = _replace(leaves, layers)
    active -= len(unreplaced)
    _backfill(leaves, unreplaced, layers)
    for rank, leaf in enumerate(_active(leaves)):  # closes the remaining gaps
        leaf.active = rank
    if grow:
        active = _activate_more(leaves, active, layers)
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


def _discard(leaves: list[_Leaf], layers: Sequence[Layer]) -> dict[int, str]:
    """Discards groups with too few healthy ranks, the inner ones first; returns the reasons."""
    why: dict[int, str] = {}
    for depth in range(len(layers), 0, -1):
        groups: dict[Path, list[_Leaf]] = {}
        for leaf in leaves:
            if leaf.healthy:
                groups.setdefault(leaf.path[:depth], []).append(leaf)
        least = layers[depth - 1].min_ranks
        for group, members in groups.items():
            for leaf in members if len(members) < least else ():
                leaf.healthy = False
                why[leaf.before] = (
                    f"its group {group[-1]!r} in layer {depth - 1} of the tree has {len(members)} "
                    f"healthy ranks, fewer than min_ranks={least}"
                )
    return why


def _replace(leaves: list[_Leaf], layers: Sequence[Layer]) -> list[_Leaf]:
    """Fills the places of lost active ranks by rule 2 of `Tree`; returns those not replaced."""
    pools: dict[Path, list[_Leaf]] = {}
    for leaf in leaves:
        if leaf.healthy and leaf.active is None:
            for group in leaf.groups():
                pools.setdefault(group, []).append(leaf)
    unreplaced = []
    for lost in _active(leaves, healthy=False):
        replacement = None
        for group in lost.groups():
            if not layers[len(group) - 1].allows(LayerFlag.RESERVE):
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


def _backfill(leaves: list[_Leaf], unreplaced: list[_Leaf], layers: Sequence[Layer]) -> None:
    """Moves the highest active ranks of each group into its gaps, by rule 3 of `Tree`."""
    domains: dict[Path, list[_Leaf]] = {}
    for lost in unreplaced:
        domain: Path = ()
        for group in lost.groups():
            if not layers[len(group) - 1].allows(LayerFlag.BACKFILL):
                break
            domain = group
        if domain:
            domains.setdefault(domain, []).append(lost)
    for domain, missing in domains.items():
        active = [leaf for leaf in _active(leaves) if leaf.path[: len(domain)] == domain]
        for leaf, lost in zip(active[-len(missing) :], missing, strict=False):
            leaf.active = lost.active


def _active(leaves: list[_Leaf], *, healthy: bool = True) -> list[_Leaf]:
    """The healthy (or gone) leaves with an active rank, in the order of that rank."""
    found = [x for x in leaves if x.healthy == healthy and x.active is not None]
    return sorted(found, key=lambda leaf: leaf.active or 0)


def _activate_more(leaves: list[_Leaf], active: int, layers: Sequence[Layer]) -> int:
    """Activates inactive ranks as far as the layers allow; returns the number of active ranks."""
    counts: collections.Counter[Path] = collections.Counter()
    for leaf in _active(leaves):
        counts.update(leaf.groups())

    def has_room(group: Path) -> bool:
        limit = layers[len(group) - 1].max_ranks
        return limit is None or counts[group] < limit

    for leaf in leaves:
        if leaf.healthy and leaf.active is None and all(map(has_room, leaf.groups())):
            leaf.active = active
            counts.update(leaf.groups())
            active += 1
    return active
