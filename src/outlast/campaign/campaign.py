"""The campaign: rounds side by side, until enough faults have fired or the time is over."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from outlast.campaign import generate
from outlast.campaign import round as rounds
from outlast.campaign.generate import Card, Shape
from outlast.campaign.network import unavailable
from outlast.campaign.options import Options
from outlast.campaign.plan import OF_HOSTS, Fault, RoundPlan, hosts_for
from outlast.campaign.programs import CampaignError, Program, Reference
from outlast.campaign.results import CampaignResult, Display, RoundResult
from outlast.chaos import Kind

T = TypeVar("T")

_LOOK_S = 0.1
_MOST_RUNS = 12
"""Runs that shorten the plan of one failed round."""
_FEW = 6
"""Faults in each round of a campaign of limited time: a round is never cut short."""
_MOST_JOBS = 8
"""Rounds side by side by default, however many cores there are: each needs gigabytes of memory."""


class Cancelled(BaseException):
    """Ends a round, because the campaign ends."""


class Campaign:
    """Runs the rounds of a campaign. A `CampaignError` if an undisturbed run fails, or differs from
    another one, or none of the kinds is possible here. A `ValueError` if a kind is not known, or
    not possible with a script. `folder`: of the results; failed rounds stay in it, others are
    removed.
    """

    def __init__(self, options: Options, folder: Path, display: Display) -> None:
        self._options, self._folder, self._display = options, folder, display
        own = not options.command
        if not own and options.device != "cpu":
            raise ValueError("--device is of the campaign's own training: a script chooses its own")
        self._kinds = _kinds(options.kinds, own)
        self._wanted = options.faults
        if options.faults is None and options.seconds is None:
            self._wanted = 1000 if own else 20
        self._jobs = options.jobs or min(len(os.sched_getaffinity(0)), _MOST_JOBS)
        self._program = Program(
            options.command or (str(rounds.TRAINING),), own=own, device=options.device
        )
        self._since = time.monotonic()
        self._lock = threading.Lock()
        # Written by the threads of the rounds:
        self._rounds: list[RoundResult] = []
        self._steps: dict[str, int] = {}
        self._ended: deque[RoundResult] = deque()
        self._faults = 0  # of the rounds that have ended, and planned for those that run
        self._longest = 0.0
        self._cancelled = threading.Event()

    def run(self) -> CampaignResult:
        options = self._options
        self._display.faults = self._wanted
        most = options.per_round if options.seconds is None else min(options.per_round, _FEW)
        faults = most if self._wanted is None else max(1, min(most, self._wanted))
        shape = self._possible(Shape(ranks=options.ranks, faults=faults, kinds=self._kinds))
        reference, steps = self._reference(generate.reference_plan(options.seed, shape))
        self._run_all(generate.plans(options.seed, shape.with_steps(steps)), reference)
        return self.result()

    def replay(self, plan: RoundPlan) -> CampaignResult:
        if plan.hosts and (why := unavailable()):
            raise CampaignError(f"this round needs several hosts: {why}")
        reference, _ = self._reference(plan.only(()))
        self._run_all(iter([plan]), reference)
        return dataclasses.replace(self.result(), seed=plan.seed, ranks=plan.ranks)

    def folder_of(self, plan: RoundPlan) -> Path:
        return self._folder / f"round-{plan.number:04d}"

    def result(self) -> CampaignResult:
        with self._lock:
            return CampaignResult(
                seed=self._options.seed,
                ranks=self._options.ranks,
                device=self._options.device,
                command=self._options.command or (),
                jobs=self._jobs,
                rounds=sorted(self._rounds, key=lambda one: one.plan.number),
                seconds=time.monotonic() - self._since,
            )

    def _possible(self, shape: Shape) -> Shape:
        of_hosts = [card for card in shape.kinds if card in OF_HOSTS]
        if not of_hosts:
            return shape
        can_share = hosts_for(shape.ranks)
        why = unavailable() if can_share else f"{shape.ranks} ranks cannot share them equally"
        if not why:
            return shape
        what = ", ".join(map(str, of_hosts))
        rest = tuple(card for card in shape.kinds if card not in OF_HOSTS)
        if not rest:
            raise CampaignError(f"without three hosts or more there is no {what}: {why}")
        self._display.line(f"without {what}: {why}")
        return dataclasses.replace(shape, kinds=rest)

    def _reference(self, plan: RoundPlan) -> tuple[Reference, int]:
        """The result of the undisturbed runs, side by side, and how many steps they have made."""
        places = {"the undisturbed run": "reference", "its repetition": "reference-again"}
        runs = list(places.items())[: self._program.undisturbed_runs]
        folders = {what: self._new(self._folder / place) for what, place in runs}

        def run(what: str) -> None:
            result = self._run_one(plan, folders[what], what, None)
            wrong = result.wrong() + [f"a restart: {why}" for why in result.unexplained]
            if wrong:
                raise CampaignError(
                    f"the undisturbed run in {folders[what]} failed: {'; '.join(wrong)}"
                )

        left = list(folders)
        self._side_by_side(lambda: left.pop(0) if left else None, run)
        first, *_ = folders.values()
        return self._program.reference(list(folders.values())), self._program.steps(first)

    def _run_all(self, upcoming: Iterator[RoundPlan], reference: Reference) -> None:
        def next_plan() -> RoundPlan | None:
            plan = next(upcoming, None) if self._continues() else None
            if plan is not None:
                with self._lock:
                    self._faults += len(plan.all_faults)
            return plan

        self._side_by_side(next_plan, lambda plan: self._run(plan, reference))

    def _continues(self) -> bool:
        """Whether to start another round, now that others may be running."""
        options = self._options
        with self._lock:
            faults, longest = self._faults, self._longest
        if self._wanted is not None and faults >= self._wanted:
            return False
        if options.seconds is None or not longest:
            return True
        return time.monotonic() - self._since + longest <= options.seconds

    def _side_by_side(self, next_one: Callable[[], T | None], run: Callable[[T], None]) -> None:
        """Calls `run` in threads, as many at a time as the options say; `next_one` is called again
        whenever one has ended. An error in one or here, such as Ctrl-C, ends those that run; it is
        raised when they have ended.

        A signal raises an exception in the main thread, which must not come between the start of a
        launcher and the code that ends it: so also a single run is in a thread.
        """
        jobs, running = self._jobs, set[Future[None]]()
        with ThreadPoolExecutor(jobs, thread_name_prefix="outlast-round") as pool:
            try:
                while True:
                    while len(running) < jobs and (one := next_one()) is not None:
                        running.add(pool.submit(run, one))
                    if not running:
                        return
                    ended, running = wait(running, _LOOK_S, FIRST_COMPLETED)
                    self._show()
                    for each in ended:
                        each.result()
            except BaseException:
                self._cancelled.set()
                raise

    def _show(self) -> None:
        while self._ended:
            self._display.ended(self._ended.popleft())
        self._display.running(dict(self._steps))

    def _run(self, plan: RoundPlan, reference: Reference) -> None:
        folder = self._new(self.folder_of(plan))
        try:
            result = self._run_one(plan, folder, f"round {plan.number}", reference)
        except Cancelled:  # it has not failed
            self._remove(folder)
            raise
        with self._lock:
            if result.fired or not result.wrong():  # a round that cannot start counts as planned
                self._faults += len(result.fired) - len(plan.all_faults)
            self._longest = max(self._longest, result.seconds)
            self._rounds.append(result)
        self._ended.append(result)
        if result.wrong():
            self._shorten(result, folder, reference)
        else:
            self._remove(folder)

    def _shorten(self, result: RoundResult, folder: Path, reference: Reference) -> None:
        plan = result.plan

        def note(shortened: RoundPlan, repeated: bool) -> None:
            (folder / "shortened.json").write_text(shortened.to_json())
            with self._lock:
                result.shortened, result.repeated, result.folder = shortened, repeated, str(folder)

        note(plan, repeated=False)  # the campaign may be stopped before the plan is shortened
        numbers = itertools.count(1)

        def fails(faults: list[Fault]) -> bool:
            place = folder / f"shortening-{next(numbers):02d}"
            what = f"shortening round {plan.number} to {len(faults)} faults"
            return bool(self._run_one(plan.only(faults), place, what, reference).wrong())

        faults = list(plan.all_faults)
        repeated = self._options.shrink and fails(faults)
        if repeated:
            faults = generate.shorten(faults, fails, _MOST_RUNS)
        note(plan.only(faults), repeated)

    def _run_one(
        self, plan: RoundPlan, folder: Path, what: str, reference: Reference | None
    ) -> RoundResult:
        def tell(step: int) -> None:
            if self._cancelled.is_set():
                raise Cancelled
            self._steps[what] = step

        try:
            round_ = rounds.Round(plan, folder, self._program, self._options.standby)
            return round_.run(reference, tell)
        finally:
            self._steps.pop(what, None)

    def _remove(self, folder: Path) -> None:
        if not self._options.keep:
            shutil.rmtree(folder)

    def _new(self, folder: Path) -> Path:
        if folder.exists():
            if not (folder / "plan.json").is_file():
                raise CampaignError(
                    f"{folder} exists, and no campaign has written it: pass another folder as --out"
                )
            shutil.rmtree(folder)
        return folder


def _kinds(names: str, own: bool) -> tuple[Card, ...]:
    chosen = generate.parse_kinds([name for part in names.split(",") if (name := part.strip())])
    if own:
        return chosen
    if not names:
        return generate.OF_SCRIPTS
    if others := [str(kind) for kind in chosen if not isinstance(kind, Kind)]:
        raise ValueError(f"{', '.join(others)}: only for the training of the campaign")
    return chosen
