"""Runs of a few saves by all ranks, and what must hold in each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from outlast.coordination.ops import Op
from simulation.saves.explorer import Explorer, State
from simulation.saves.simulated_rank import LEDGER, Call, committed, file, names_both, threads_of

DONE = "done"


@dataclasses.dataclass(frozen=True)
class Run:
    """What happens: the `calls` of each rank, a process that may die, a rank that drops its saves,
    waits that may end too early.
    """

    calls: tuple[tuple[Call, ...], ...]
    deaths: int = 0
    early: int = 0
    aborting: int | None = None

    @property
    def size(self) -> int:
        return len(self.calls)

    @property
    def explorer(self) -> Explorer:
        threads = [
            thread
            for rank, calls in enumerate(self.calls)
            for thread in threads_of(rank, self.size, calls, aborts=rank == self.aborting)
        ]
        return Explorer(threads, self.watch, self.finish, deaths=self.deaths, early=self.early)

    # ------------------------------------------------------------------------ in every state

    def watch(self, table: dict[str, bytes], op: Op) -> None:
        """Before an operation: a save is done, and committed, only if every rank has announced it,
        under the step that is committed, and has written its files.
        """
        for number in range(max(map(len, self.calls))):
            verdict = f"{LEDGER}/done{number}/verdict"
            done = op.name == "claim" and op.key == verdict and op.value == b"{}"
            commits = op.key == committed(number)
            if commits or (done and verdict not in table):
                announced = int(table.get(f"{LEDGER}/begun{number}/count/0/0", b"0"))
                assert announced == self.size, f"{announced} of {self.size} ranks have announced"
            if commits:
                step = int(op.value)
                absent = [r for r in range(self.size) if file(number, step, r) not in table]
                assert not absent, f"committed without the files of ranks {absent}"
                assert table.get(verdict) == b"{}", "committed, and not all are done"

    # -------------------------------------------------------------------------- at the end

    def finish(self, state: State, waited: bool) -> None:
        table = dict(state.table)
        alive = [point for point in state.points if point is not None]
        for point in alive:
            key = "" if point.op is None else point.op.key
            assert key in ("", point.thread.started_by), f"{point.thread.name} waits for {key}"
        ranks = {p.thread.process: p.value for p in alive if p.thread.name.startswith("rank")}
        unsure = any("it is not known" in said for made in ranks.values() for said in made)
        whole = len(alive) == len(state.points) and len(set(map(len, self.calls))) == 1
        assert not waited or not whole or self.early, "a wait took too long, and all ranks came"
        for number in range(max(map(len, self.calls))):
            outcomes = {r: said[number] for r, said in ranks.items() if number < len(said)}
            at = committed(number) in table
            for rank, outcome in outcomes.items():
                unknown = "it is not known whether" in outcome and (waited or not whole)
                agrees = at == (outcome == DONE) or (unknown and rank != 0)
                if self._calls(number)[0].kind != "prepare":
                    assert agrees, f"save {number} is committed: {at}; rank {rank}: {outcome}"
            if whole and not waited:
                self._undisturbed(number, outcomes)
        if whole and self.aborting is None and not unsure:
            left = sorted(key for key in table if key.startswith(f"{LEDGER}/"))
            assert not left, f"left in the store: {left}"

    def _undisturbed(self, number: int, outcomes: dict[int, str]) -> None:
        calls = self._calls(number)
        same = {re.sub(r"; rank \d+ was at .*", "", said) for said in outcomes.values()}
        # A rank that has no snapshot raises its own error, before it has heard of another's.
        same = {said for said in same if said == DONE or said.startswith("the ")}
        assert len(same) <= 1, f"the ranks have different outcomes: {outcomes}"
        fails = any("cannot" in call.kind or call.kind == "fails" for call in calls)
        divides = any(call.kind in ("new", "prepare") for call in calls)
        fails = fails or (calls[0].indivisible and divides)
        differ = len({call.name for call in calls}) > 1
        if fails or differ:
            assert DONE not in same, f"save {number} ended well"
        elif self.aborting is None:
            assert same == {DONE}, f"save {number} failed: {outcomes}"
        if differ and not fails and self.aborting is None:
            for rank, said in outcomes.items():
                assert names_both(said, calls), f"rank {rank} does not name both saves: {said}"

    def _calls(self, number: int) -> Sequence[Call]:
        return [calls[number] for calls in self.calls if number < len(calls)]
