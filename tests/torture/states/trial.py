"""Runs cases in batches, one at a time after a crash, and shrinks what is wrong."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..calls import Calls
from ..crash_states import Result
from .cases import Node, replaced, walk
from .judge import Case, Target, make_case
from .sides import Died, Side, temporary

_BATCH = 40
_SHRINKS = 25
EVERY = 20
"""One seed in so many is also that of a job: it takes as long."""
PER_TRIAL = 100_000
"""The cases of trial seed N are those from N times this one on."""


class Runner:
    """The processes, started when they are needed, and again when they died."""

    def __init__(self) -> None:
        self._sides: dict[str, list[Side]] = {}
        self._folder, self._meetings = tempfile.TemporaryDirectory(prefix="states-"), 0

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        for sides in self._sides.values():
            for each in sides:
                each.end()
        self._folder.cleanup()

    def run(self, cases: Sequence[Case]) -> tuple[int, dict[int, list[str]]]:
        """Runs the cases; how many saves and restores there were, and what is wrong, by seed."""
        try:
            return self._batch(cases)
        except Died as e:
            if len(cases) == 1:
                return 1, {cases[0].seed: [str(e)]}
        tried, wrong = 0, dict[int, list[str]]()
        for case in cases:
            more, found = self.run([case])
            tried, wrong = tried + more, {**wrong, **found}
        return tried, wrong

    def _batch(self, cases: Sequence[Case]) -> tuple[int, dict[int, list[str]]]:
        tried, wrong = 0, dict[int, list[str]]()
        for route in dict.fromkeys(map(_route, cases)):
            chosen = [case for case in cases if _route(case) == route]
            with temporary() as folder:
                for what, size in zip(("save", "restore"), route, strict=True):
                    more, _, found = self._ask(what, folder, chosen, size)
                    tried += more
                    for seed, texts in found.items():
                        before = "" if route == (1, 1) else f"{route[0]} to {route[1]} ranks: "
                        wrong.setdefault(seed, []).extend(before + each for each in texts)
        return tried, wrong

    def programs(self, seeds: Sequence[int]) -> tuple[int, dict[int, list[str]]]:
        """Runs the programs of these seeds."""
        try:
            with temporary() as folder:
                tried, _, wrong = self._ask("programs", folder, seeds)
                return tried, wrong
        except Died as e:
            if len(seeds) == 1:
                return 1, {seeds[0]: [str(e)]}
        found = [self.programs([seed]) for seed in seeds]
        return sum(tried for tried, _ in found), {
            k: v for _, each in found for k, v in each.items()
        }

    def _ask(
        self, what: str, folder: Path, cases: Sequence[Any], size: int = 1
    ) -> tuple[int, set[int], dict[int, list[str]]]:
        name = "pair" if size > 1 else "restores" if what == "restore" else "saves"
        if name not in self._sides:
            self._meetings += 1
            meeting = f"{self._folder.name}/{self._meetings}"
            self._sides[name] = [Side(rank, size, meeting) for rank in range(size)]
        sides = self._sides[name]
        for each in sides:
            each.tell(what, folder, cases)
        try:
            found = [each.answer() for each in sides]
        except Died:
            for each in self._sides.pop(name):
                each.end()
            raise
        wrong = {seed: texts for _, _, each in found for seed, texts in each.items()}
        return found[0][0], found[0][1], wrong


def _route(case: Case) -> tuple[int, int]:
    """The numbers of ranks that save and that restore a case."""
    return {0: (1, 2), 5: (2, 1)}.get(case.seed % 10, (1, 1))


def shrunk(case: Case, runner: Runner) -> Case:
    """A smaller case that is wrong, too."""
    left = _SHRINKS
    again = True
    while again and left > 0:
        again = False
        for smaller in _smaller(case):
            left -= 1
            if runner.run([smaller])[1]:
                case, again = smaller, True
                break
            if left <= 0:
                break
    return case


def _smaller(case: Case) -> Iterable[Case]:
    if len(case.targets) > 1:
        for number in range(len(case.targets)):
            kept = (each for at, each in enumerate(case.targets) if at != number)
            yield dataclasses.replace(case, targets=tuple(kept))
    if case.twice:
        yield dataclasses.replace(case, twice=False)
    for path, each in walk(case.spec):
        if not path:
            continue
        news = [None]
        if isinstance(each, Node) and len(each.entries) == 1:
            news.append(each.entries[0][1])  # type: ignore[arg-type]
        for new in news:
            spec = replaced(case.spec, path, new)
            targets = (
                Target(replaced(t.spec, path, new), t.harmless, t.what)  # type: ignore[arg-type]
                for t in case.targets
            )
            yield dataclasses.replace(case, spec=spec, targets=tuple(targets))  # type: ignore[arg-type]


def replay(seed: int) -> str:
    """The command that runs one case again."""
    return f"PYTHONPATH=tests {shlex.quote(sys.executable)} -m torture.states --seed {seed}"


def run_cases(seeds: Iterable[int], until: float, *, shrink: bool = True) -> Result:
    """Runs the cases of these seeds until the time is over."""
    tried, violations, batch, known = 0, list[str](), list[Case](), set[str]()

    def run() -> int:
        count, wrong = runner.run(batch)
        with_job = [case.seed for case in batch if case.seed % EVERY == 0]
        if with_job:
            more, found = runner.programs(with_job)
            count += more
            for seed, texts in found.items():
                violations.extend(f"{each}\n    replay: {replay(seed)}" for each in texts)
        for case in batch:
            if texts := wrong.get(case.seed):
                kind = re.sub(r"[\d'].*", "", texts[0], flags=re.DOTALL)
                small = case if not shrink or kind in known else shrunk(case, runner)
                known.add(kind)
                violations.append(f"{texts[0]}\n    {small}\n    replay: {replay(case.seed)}")
        batch.clear()
        return count

    with Runner() as runner:
        for seed in seeds:
            batch.append(make_case(seed))
            if len(batch) == _BATCH:
                tried += run()
                if time.monotonic() > until:
                    break
        if batch:
            tried += run()
    return Result(tried, violations)


def try_states(calls: Calls | None, seed: int, until: float, most: int | None) -> Result:
    """The cases of one trial, `most` at the most."""
    return run_cases(range(seed * PER_TRIAL, seed * PER_TRIAL + (most or PER_TRIAL)), until)
