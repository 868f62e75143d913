"""A round, and a campaign of them, with a stand-in for `outlast run` that is wrong on purpose."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from campaign import launchers, stand_in
from outlast.campaign.campaign import CampaignError
from outlast.campaign.plan import Action, LauncherFault, RoundPlan
from outlast.campaign.results import CampaignResult, RoundResult
from outlast.campaign.round import Round

PLAN = RoundPlan(seed=1, number=1, ranks=2, steps=8)


def run(tmp_path: Path, script: str, plan: RoundPlan = PLAN, stall_s: float = 60) -> CampaignResult:
    with pytest.MonkeyPatch.context() as patch:
        stand_in.use(patch, script, stall_s=stall_s)
        running, _ = stand_in.campaign(tmp_path)
        return running.replay(plan)


def test_an_undisturbed_training_has_no_problems(tmp_path: Path) -> None:
    result = run(tmp_path, "right")
    assert not result.failures
    assert result.rounds[0].exit_codes == [0]
    assert not (tmp_path / "round-0001").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "kind", "text"),
    [
        ("wrong_loss", "differences", "the loss of step 2 on rank 0 is 0x1.555555555555"),
        ("wrong_weights", "differences", "weights in the end on rank 1 is other, undisturbed same"),
        pytest.param("leaves_a_process", "orphans", "time.sleep(600)", marks=pytest.mark.slow),
        ("leaves_a_file", "leftovers", "temporary file"),
        ("leaves_a_save", "leftovers", ".tmp-step-00000003-x: not committed"),
        ("leaks", "leaks", "rank 0 (process 1) has more descriptors with each restart (socket: 40"),
    ],
)
def test_each_problem_is_found(tmp_path: Path, script: str, kind: str, text: str) -> None:
    result = run(tmp_path, script)
    problems = result.rounds[0].problems
    assert text in "\n".join(problems[kind])
    assert [name for name, texts in problems.items() if texts] == [kind], problems
    assert int(result.totals()[kind]) == len(problems[kind])


@pytest.mark.parametrize(("action", "code"), [(Action.STOP, 143), (Action.KILL_LAUNCHER, -9)])
def test_a_stopped_job_is_resumed(tmp_path: Path, action: Action, code: int) -> None:
    plan = structs.replace(PLAN, launcher=(LauncherFault(action, launchers.STOPPED_AT),))
    result = run(tmp_path, "waits", plan)
    assert not result.failures
    assert result.rounds[0].exit_codes == [code, 0]
    assert [(one.kind, one.step) for one in result.fired] == [(action.value, launchers.STOPPED_AT)]


def test_an_undisturbed_run_that_fails_ends_the_campaign(tmp_path: Path) -> None:
    with pytest.raises(CampaignError, match=r"exit code 3:\nthe last words"):
        run(tmp_path, "fails")


@pytest.mark.slow
def test_a_job_without_progress_is_ended(tmp_path: Path) -> None:
    with pytest.raises(CampaignError, match="no rank completed a step for 5 s, after step 1"):
        run(tmp_path, "stalls", stall_s=5)


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_rounds_run_side_by_side_and_an_error_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """An error in one of them, or in the main thread."""
    running, _ = stand_in.campaign(tmp_path, jobs=2)
    both = threading.Barrier(2)
    now, most, ended = [], [], []

    def short() -> None:
        now.append(1)
        most.append(len(now))
        both.wait(60)  # passes only with two at a time
        now.pop()

    def endless(_: Round, reference: None, tell: Callable[[int], None]) -> RoundResult:
        both.wait(60)
        try:
            while True:
                tell(1)
        finally:
            ended.append(1)

    def fails() -> None:
        both.wait(60)
        if error is ArithmeticError:
            raise error

    def look() -> None:
        if error is KeyboardInterrupt and not tasks:
            raise error

    monkeypatch.setattr(Round, "run", endless)
    monkeypatch.setattr(running, "_show", look)
    one = functools.partial(running._run_one, PLAN, tmp_path, "a round", None)
    tasks = [fails, one, short, short, short, short]
    with pytest.raises(error):
        running._side_by_side(lambda: tasks.pop() if tasks else None, lambda task: task())
    assert max(most) == 2
    assert ended


def test_a_failed_round_leaves_its_plan_and_the_shortened_one(tmp_path: Path) -> None:
    faults = tuple(LauncherFault(Action.STOP, 100 + number) for number in range(3))
    plan = structs.replace(PLAN, launcher=faults)
    result = run(tmp_path, "wrong_loss", plan)
    ((failed, shortened),) = result.failures
    assert failed.repeated
    assert len(shortened.all_faults) == 1
    folder = Path(failed.folder)
    assert RoundPlan.load(folder / "plan.json") == plan
    assert RoundPlan.load(folder / "shortened.json") == shortened
    assert json.loads(result.to_json())["failures"][0]["problems"] == result.rounds[0].wrong()
