"""`Tree`: a rank assignment that follows the topology of the job, with reserve ranks.

The ranks are the leaves of a tree whose inner nodes are groups, e.g. the hosts of a rack. Each
`Layer` says for its groups how many ranks they need, how many call the function, and where a
replacement for a lost rank may come from.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence

from outlast.errors import RankDiscarded, RestartAbort
from outlast.inprocess.rank_assignment import RankAssignment, as_ranks
from outlast.inprocess.recovery.ranks.tree_arrangement import (
    Arrangement,
    LayerRule,
    Path,
    first_arrangement,
    next_arrangement,
)
from outlast.inprocess.state import State, Status
from outlast.system.arguments import check_callable, check_int

__all__ = ["Layer", "LayerFlag", "Tree"]


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
        key_or_fn: the group of a rank: a string, or `fn(state)`, called on each rank with its own
            state.
        flag: see `LayerFlag`.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: str | Callable[[State], object] = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        check_int("min_ranks", self.min_ranks, at_least=0)
        if self.max_ranks is not None:
            check_int("max_ranks", self.max_ranks, at_least=0)
        if self.flag is not None and not isinstance(self.flag, LayerFlag):
            raise TypeError(f"flag must be a LayerFlag or None, not {self.flag!r}")

    def key(self, state: State) -> str:
        """The group of the rank with this state."""
        return str(self.key_or_fn(state) if callable(self.key_or_fn) else self.key_or_fn)

    def rule(self) -> LayerRule:
        """What the arrangement needs to know of this layer."""
        flag = self.flag or LayerFlag(0)
        reserve, backfill = LayerFlag.RESERVE in flag, LayerFlag.BACKFILL in flag
        return LayerRule(self.min_ranks, self.max_ranks, reserve, backfill)


class Tree(RankAssignment):
    """Assigns and activates ranks by the topology of the job.

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

    `Tree` cannot be composed with other assignments, except `AwaitReplacements`; no rank filter is
    needed. Each rank computes its own keys; the wrapper exchanges them. Outside a wrapped call the
    functions of the layers are called for all ranks.

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
        self,
        layers: Sequence[Layer],
        world_size_filter: Callable[[int], int] | None = None,
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
        if received is None:
            arrangement = self._without_a_job(state, gone)
        else:
            arrangement = self._in_a_job(received)
        self._last = arrangement
        size = len(arrangement.paths)
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
        rank = arrangement.before.index(state.rank)
        status = Status.INACTIVE
        if rank < arrangement.active:
            status = Status.INITIALIZED if state.status is Status.INACTIVE else state.status
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
            told = next((v["last"] for v in values.values() if v["last"] is not None), None)
            if told is not None:
                last = Arrangement(tuple(map(tuple, told["paths"])), told["active"])
        if newcomers and not any(value["last"] for value in values.values()):
            return self._first(paths, ())  # every rank that was to tell the newcomers is lost
        assert last is not None
        return next_arrangement(last, paths, newcomers, self._rules(), self.world_size_filter)

    def _without_a_job(self, state: State, gone: frozenset[int]) -> Arrangement:
        """For tests of a tree: the keys of all ranks are computed here."""
        if self._last is not None and len(self._last.paths) == state.world_size:
            paths = {r: p for r, p in enumerate(self._last.paths) if r not in gone}
            return next_arrangement(self._last, paths, (), self._rules(), self.world_size_filter)
        states = (state.copy(rank=r, initial_rank=r) for r in range(state.world_size))
        return self._first({each.rank: self._path(each) for each in states}, gone)

    def _first(self, paths: Mapping[int, Path], gone: Collection[int]) -> Arrangement:
        roots = sorted({path[0] for path in paths.values()})
        if len(roots) > 1:
            raise RuntimeError(f"Tree: all ranks must have one key in the first layer, not {roots}")
        arrangement = first_arrangement(paths, self._rules(), self.world_size_filter, gone)
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

    def _rules(self) -> list[LayerRule]:
        return [layer.rule() for layer in self.layers]
