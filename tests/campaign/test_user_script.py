"""A user's script in a campaign: how it is started, and what of it is compared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec import structs
from typer.testing import CliRunner

from async_checkpoint import made
from outlast.async_checkpoint.storage.entries import Shard, TensorEntry
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.campaign.generate import OF_SCRIPTS, Shape, plans
from outlast.campaign.plan import RoundPlan
from outlast.campaign.programs import CampaignError, Program
from outlast.chaos import fail_at
from outlast.chaos.storage import flip_byte
from outlast.launch.cli import app

SCRIPT = Path(__file__).parent / "scripts" / "trains.py"
PLAN = RoundPlan(seed=1, number=1, ranks=2, steps=60)


def invoke(*arguments: str) -> tuple[int, str]:
    """The exit code, and the output as plain words."""
    result = CliRunner().invoke(app, ["chaos", "campaign", *arguments])
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture
def script() -> Program:
    return Program([str(SCRIPT)])


def a_run(folder: Path, step: int = 60, place: str = "run/saved", **tensors: int) -> Path:
    """What a run of 60 steps has left: its events, and a checkpoint."""
    log = folder / "events" / "20261121-212345.123-run" / "rank0-1.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text(json.dumps({"kind": "steps_done", "first": 0, "last": 60}) + "\n")
    values = {"model.weight": 1, **{name.replace("_", "."): n for name, n in tensors.items()}}
    entries = {
        name: TensorEntry([name], "uint8", [4], [Shard([0], [4], "all", 4 * index)])
        for index, name in enumerate(values)
    }
    content = b"".join(bytes([value]) * 4 for value in values.values())
    storage = LocalStorage(folder / "work" / place)
    made.save(storage, 40, save_id="bb")
    made.save(storage, step, {"all": content}, tensors=entries)
    return folder


def test_each_run_has_a_working_directory(script: Program, tmp_path: Path) -> None:
    assert script.command(PLAN, tmp_path) == [str(SCRIPT)]
    assert script.working_directory(tmp_path) == tmp_path / "work"
    assert (tmp_path / "work").is_dir()


def test_an_argument_may_name_the_folder_instead(tmp_path: Path) -> None:
    script = Program([str(SCRIPT), "--out={folder}/saved", "{other}"])
    assert script.command(PLAN, tmp_path)[1:] == [f"--out={tmp_path}/work/saved", "{other}"]
    assert script.working_directory(tmp_path) is None


def test_a_script_that_is_none_is_refused(tmp_path: Path) -> None:
    code, output = invoke(f"--out={tmp_path}", "--", "none.py", "--lr", "1")
    assert code == 1
    assert "none.py is not a file" in output
    code, output = invoke("--kinds=sigkill,stop", "--", str(SCRIPT))
    assert code == 2
    assert "stop: only for the training of the campaign" in output


def test_without_a_job_or_a_checkpoint_nothing_can_be_compared(
    script: Program, tmp_path: Path
) -> None:
    (tmp_path / "work").mkdir()
    with pytest.raises(CampaignError, match=r"has completed no step of `outlast\.Job`"):
        script.steps(tmp_path)
    done = a_run(tmp_path / "elsewhere")
    (tmp_path / "events").symlink_to(done / "events")
    with pytest.raises(CampaignError, match=r"no checkpoint in .*work.* relative folder.*folder"):
        script.reference([tmp_path, tmp_path])


def test_what_is_equal_is_equal(script: Program, tmp_path: Path) -> None:
    expected = script.reference([a_run(tmp_path / "1"), a_run(tmp_path / "2")])
    assert script.steps(tmp_path / "1") == 60
    assert script.differences(expected, a_run(tmp_path / "3"), PLAN) == []


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"model_weight": 2}, r"model\.weight in run/saved is uint8\[4\] [0-9a-f]{32}"),
        ({"model_bias": 2}, r"model\.bias in run/saved is .* undisturbed there is no such value"),
        ({"step": 59}, "the step of the last checkpoint in run/saved is 59, undisturbed 60"),
        ({"place": "another"}, "the step of the last checkpoint in run/saved is missing"),
    ],
)
def test_what_differs_is_named(
    script: Program, tmp_path: Path, more: dict[str, int], text: str
) -> None:
    expected = script.reference([a_run(tmp_path / "1"), a_run(tmp_path / "2")])
    found = script.differences(expected, a_run(tmp_path / "3", **more), PLAN)
    assert any(re.search(text, one) for one in found), found


def test_a_script_that_differs_from_itself_is_refused(script: Program, tmp_path: Path) -> None:
    runs = [a_run(tmp_path / "1"), a_run(tmp_path / "2", model_weight=2)]
    with pytest.raises(CampaignError, match=r"two undisturbed runs differ.* seed .*model\.weight"):
        script.reference(runs)


@pytest.mark.parametrize("first", [True, False])
def test_a_folder_of_checkpoints_that_only_one_undisturbed_run_has_is_a_difference(
    script: Program, tmp_path: Path, first: bool
) -> None:
    runs = [a_run(tmp_path / "1"), a_run(tmp_path / "2")]
    made.save(LocalStorage(runs[not first] / "work" / "more"), 40)
    with pytest.raises(CampaignError, match="the step of the last checkpoint in more is "):
        script.reference(runs)


def test_a_generator_that_nobody_has_seeded_does_not_count(script: Program, tmp_path: Path) -> None:
    runs = [a_run(tmp_path / str(n), random_0_numpy=n, random_0_torch=7) for n in range(3)]
    expected = script.reference(runs[:2])
    assert script.differences(expected, runs[2], PLAN) == []
    other = a_run(tmp_path / "other", random_0_numpy=9, random_0_torch=8)
    (found,) = script.differences(expected, other, PLAN)
    assert "random.0.torch in run/saved" in found


def test_a_planned_damage_is_no_difference(script: Program, tmp_path: Path) -> None:
    expected = script.reference([a_run(tmp_path / "1"), a_run(tmp_path / "2")])
    damaged = a_run(tmp_path / "3")
    flip_byte(next(damaged.rglob("all")), 0)
    (found,) = script.differences(expected, damaged, PLAN)
    assert "the last checkpoint is damaged" in found
    planned = structs.replace(PLAN, faults=(fail_at(0, kind="torn_write", step=1),))
    assert script.differences(expected, damaged, planned) == []


@pytest.mark.parametrize("steps", [1, 60, 61, 500, 5000])
def test_the_faults_come_within_the_steps_of_the_script(steps: int) -> None:
    shape = Shape(ranks=2, faults=40, kinds=OF_SCRIPTS).with_steps(steps)
    rounds = plans(0, shape)
    for plan in (next(rounds) for _ in range(20)):
        assert plan.steps == steps
        assert 1 <= len(plan.faults) <= 40
        assert max(fault.step or 0 for fault in plan.faults) < steps
    assert shape.faults == min(40, max(1, (steps - 20) // 10))


@pytest.mark.slow
def test_a_script_through_faults(tmp_path: Path) -> None:
    code, output = invoke(
        *("--faults=4", "--faults-per-round=4", "--kinds=exception,sigkill", "--seed=2"),
        *("--nproc-per-node=2", "--no-shrink", f"--out={tmp_path}"),
        *("--", str(SCRIPT), "checkpoints", "nothing"),
    )
    assert code == 0, output
    assert "identical" in output
    assert "differences: 0, orphans: 0, leaks: 0, leftovers: 0, believed: 0" in output
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["faults"] >= 4
    assert results["command"] == [str(SCRIPT), "checkpoints", "nothing"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_script_that_a_restart_changes_fails(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    faults = (fail_at(1, kind="exception", step=30),)
    plan.write_text(RoundPlan(seed=1, number=1, ranks=2, steps=60, faults=faults).to_json())
    arguments = (str(SCRIPT), "{folder}/saved", "restart")
    code, output = invoke(
        f"--replay={plan}", "--no-shrink", f"--out={tmp_path / 'out'}", "--", *arguments
    )
    assert code == 1, output
    assert "round 1: 1 faults in" in output
    assert "differences: model.bias in saved is float32[1]" in output
    assert f"round-0001/shortened.json -- {SCRIPT} '{{folder}}/saved' restart" in output


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_script_without_a_seed_is_refused_before_any_fault(tmp_path: Path) -> None:
    code, output = invoke(
        *("--faults=1", "--nproc-per-node=2", f"--out={tmp_path}"),
        *("--", str(SCRIPT), "checkpoints", "unseeded"),
    )
    assert code == 1
    assert "two undisturbed runs differ, so that no difference could be blamed on a" in output
    assert "model.weight in " in output
    assert not list(tmp_path.glob("round-*"))
