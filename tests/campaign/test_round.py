"""A round, and a campaign of them, with a stand-in for `outlast run` that is wrong on purpose."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from campaign import launchers
from outlast.campaign.campaign import Campaign, CampaignError, Options
from outlast.campaign.plan import Action, LauncherFault, RoundPlan
from outlast.campaign.results import CampaignResult

PLAN = RoundPlan(seed=1, number=1, ranks=2, steps=8)


def run(tmp_path: Path, script: str, plan: RoundPlan = PLAN, stall_s: float = 60) -> CampaignResult:
    options = Options(
        out=tmp_path, script=Path(script), launcher=launchers.COMMAND, stall_s=stall_s, linger_s=1
    )
    return Campaign(options).replay(plan)


def test_an_undisturbed_training_has_no_problems(tmp_path: Path) -> None:
    result = run(tmp_path, "right")
    assert not result.failures
    assert result.rounds[0].exit_codes == (0,)
    assert not (tmp_path / "round-0001").exists()


@pytest.mark.parametrize(
    ("script", "kind", "text"),
    [
        ("wrong_loss", "differences", "step 2 on rank 0: the loss is 0x1.555555555555"),
        ("wrong_weights", "differences", "rank 1: weights in the end is other, undisturbed same"),
        ("leaves_a_process", "orphans", "time.sleep(600)"),
        ("leaves_a_file", "leftovers", "temporary file"),
        ("leaves_a_save", "leftovers", ".tmp-step-00000003-x: not committed"),
        ("leaks", "leaks", "rank 0 (process 1) has more descriptors with each restart (socket: 40"),
    ],
)
def test_each_problem_is_found(tmp_path: Path, script: str, kind: str, text: str) -> None:
    result = run(tmp_path, script)
    problems = result.rounds[0].problems
    assert text in "\n".join(getattr(problems, kind))
    others = dataclasses.replace(problems, **{kind: ()})
    assert not others, others
    assert result.count(kind) >= 1


@pytest.mark.parametrize(("action", "code"), [(Action.STOP, 143), (Action.KILL_LAUNCHER, -9)])
def test_a_stopped_job_is_resumed(tmp_path: Path, action: Action, code: int) -> None:
    plan = dataclasses.replace(PLAN, launcher=(LauncherFault(action, launchers.STOPPED_AT),))
    result = run(tmp_path, "waits", plan)
    assert not result.failures
    assert result.rounds[0].exit_codes == (code, 0)
    assert [(one.kind, one.step) for one in result.fired] == [(action.value, launchers.STOPPED_AT)]


def test_an_undisturbed_run_that_fails_ends_the_campaign(tmp_path: Path) -> None:
    with pytest.raises(CampaignError, match=r"exit code 3:\nthe last words"):
        run(tmp_path, "fails")


@pytest.mark.slow
def test_a_job_without_progress_is_ended(tmp_path: Path) -> None:
    with pytest.raises(CampaignError, match="no rank completed a step for 0 s, after step 1"):
        run(tmp_path, "stalls", stall_s=0.3)


def test_a_failed_round_leaves_its_plan_and_the_shortened_one(tmp_path: Path) -> None:
    faults = tuple(LauncherFault(Action.STOP, 100 + number) for number in range(3))
    plan = dataclasses.replace(PLAN, launcher=faults)
    result = run(tmp_path, "wrong_loss", plan)
    failure = result.failures[0]
    assert failure.repeated
    assert len(failure.shortened.all_faults) == 1
    folder = Path(failure.folder)
    assert RoundPlan.load(folder / "plan.json") == plan
    assert RoundPlan.load(folder / "shortened.json") == failure.shortened
    assert json.loads(result.to_json())["failures"][0]["problems"] == list(
        result.rounds[0].problems.lines()
    )
