"""`outlast chaos campaign`: its options; and, with real jobs, a minute of faults."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from campaign import stand_in
from outlast.campaign import job as jobs
from outlast.campaign.environment import reap_orphans
from outlast.campaign.plan import Action, LauncherFault, RoundPlan
from outlast.campaign.results import Display
from outlast.launch.cli import app


def invoke(*arguments: str) -> tuple[int, str]:
    """The exit code, and the output as plain words."""
    result = CliRunner().invoke(app, ["chaos", "campaign", *arguments])
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds are run by the stand-in for `outlast run`, with a training that is right."""
    stand_in.use(monkeypatch, "waits")


def test_an_unknown_kind_is_refused() -> None:
    code, output = invoke("--kinds", "hang,explosion")
    assert code == 2
    assert "unknown kind 'explosion'" in output


def test_a_plan_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    code, output = invoke("--replay", str(tmp_path / "none.json"), "--out", str(tmp_path))
    assert code == 1
    assert output.endswith("none.json: cannot be read: No such file or directory")


@pytest.mark.usefixtures("_stand_in")
def test_the_table_and_the_results_are_written(tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    before = "in `<!-- campaign: begin -->`\n<!-- campaign: begin -->\n"
    table.write_text(f"{before}old\n<!-- campaign: end -->\nafter\n")
    code, output = invoke(
        *("--faults", "1", "--kinds", "stop", "--nproc-per-node", "1", "--seed", "4"),
        *("--out", str(tmp_path / "out"), "--markdown", str(table)),
    )
    assert code == 0, output
    assert "round 1: 1 faults in" in output
    assert "differences: 0, orphans: 0, leaks: 0, leftovers: 0, believed: 0" in output
    page = table.read_text()
    assert page.startswith(f"{before}\nSeed 4, 1 ranks, ")
    assert "| stop | 1 | - | - | - |" in page
    assert page.endswith("\n\n<!-- campaign: end -->\nafter\n")
    assert "old" not in page
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["faults"] == 1
    assert results["rounds"][0]["exit_codes"] == [143, 0]


@pytest.mark.usefixtures("_stand_in")
def test_a_failure_is_printed_with_the_command_that_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.use(monkeypatch, "waits_wrong_loss")
    code, output = invoke(
        "--faults=1", "--kinds=stop", "--nproc-per-node=1", "--seconds=1", f"--out={tmp_path}"
    )
    assert code == 1
    assert "round 1: 1 faults in" in output
    assert "FAILED" in output
    assert "Shortened from 1 to 1 faults" in output
    assert f"outlast chaos campaign --replay {tmp_path}/round-0001/shortened.json" in output


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize(
    ("training", "job"), [("slow", "round 1"), ("stalls", "the undisturbed run")]
)
def test_sigterm_ends_the_running_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: str, job: str
) -> None:
    before = psutil.Process().children()
    left: list[psutil.Process] = []
    reaped: list[str] = []

    def running(self: Display, steps: Mapping[str, int]) -> None:
        # Between two launchers of a round there is no job.
        if steps.get(job) and not left:
            left.extend(set(psutil.Process().children()) - set(before))
            if left:
                os.kill(os.getpid(), signal.SIGTERM)

    def reap(mark: str, linger_s: float) -> list[str]:
        if left:
            signal.raise_signal(signal.SIGTERM)  # an impatient second one changes nothing
            reaped.append(mark)
        return reap_orphans(mark, linger_s)

    monkeypatch.setattr(Display, "running", running)
    monkeypatch.setattr(jobs, "reap_orphans", reap)
    stand_in.use(monkeypatch, training)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    handler = signal.getsignal(signal.SIGTERM)
    code, output = invoke("--faults=1", "--kinds=stop", "--nproc-per-node=1")
    assert code == 143, output
    assert left
    assert len(reaped) == 1
    assert not any(process.is_running() for process in left)
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "stopped; rounds that have ended: 0" in output


@pytest.mark.slow
@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("script", ["slow", "slow_wrong_loss"])
def test_a_campaign_that_is_stopped_tells_what_has_ended(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second round, or while the first, which has failed, is shortened."""
    sent: list[bool] = []

    def running(self: Display, steps: Mapping[str, int]) -> None:
        if not sent and (steps.get("round 2") or steps.get("shortening round 1 to 1 faults")):
            sent.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Display, "running", running)
    stand_in.use(monkeypatch, script)
    code, output = invoke(
        *("--faults=2", "--faults-per-round=1", "--kinds=stop", "--nproc-per-node=1"),
        *("--jobs=1", f"--out={tmp_path}"),
    )
    assert code == 130, output
    assert f"stopped; rounds that have ended: 1, in {tmp_path}" in output
    assert "faults: 1, rounds: 1" in output
    results = json.loads((tmp_path / "results.json").read_text())
    assert [each["plan"]["number"] for each in results["rounds"]] == [1]
    failed = "wrong" in script
    assert [each["round"] for each in results["failures"]] == [1] * failed
    kept = {"reference", "results.json"} | ({"round-0001"} if failed else set())
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_two_campaigns_cannot_use_one_folder(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        code, output = invoke("--faults=1", f"--out={tmp_path}")
    finally:
        os.close(descriptor)
    assert code == 1
    assert "another campaign is running in" in output


@pytest.mark.usefixtures("_stand_in")
def test_only_folders_of_campaigns_are_removed(tmp_path: Path) -> None:
    mine = tmp_path / "reference" / "mine"
    mine.parent.mkdir()
    mine.touch()
    code, output = invoke("--faults=1", "--kinds=stop", f"--out={tmp_path}")
    assert code == 1
    assert "reference exists, and no campaign has written it" in output
    assert mine.exists()


@pytest.mark.usefixtures("_stand_in")
def test_a_plan_is_not_replayed_over_its_own_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.use(monkeypatch, "right")
    plan = tmp_path / "round-0003" / "shortened.json"
    plan.parent.mkdir()
    plan.write_text(RoundPlan(seed=1, number=3, ranks=1, steps=9).to_json())
    code, output = invoke(f"--replay={plan}", f"--out={tmp_path}")
    assert code == 1
    assert "which this run would replace" in output
    assert plan.exists()
    code, output = invoke(f"--replay={plan}", f"--out={tmp_path / 'other'}")
    assert code == 0, output


@pytest.mark.usefixtures("_stand_in")
def test_faults_that_did_not_fire_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.use(monkeypatch, "right")
    never = LauncherFault(Action.STOP, 100)
    plan = RoundPlan(seed=1, number=1, ranks=1, steps=9, launcher=(never,))
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    code, output = invoke(f"--replay={file}", f"--out={tmp_path / 'out'}")
    assert code == 0, output
    assert "round 1: 0 of 1 planned faults in" in output


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a busy machine its first round takes minutes
@pytest.mark.exhaustive
def test_a_minute_of_faults(tmp_path: Path) -> None:
    """Real jobs. The seed is a new one every day; it is in the output of a failure."""
    seed = str(datetime.date.today().toordinal())
    code, output = invoke(
        "--seconds=60", "--jobs=1", f"--seed={seed}", f"--out={tmp_path}", "--no-shrink"
    )
    assert code == 0, output
