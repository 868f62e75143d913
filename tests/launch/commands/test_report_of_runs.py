"""`outlast report` on real runs whose scripts do not use `Wrapper`: what the launcher saw."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.runs import WORKER, Run
from outlast.events.report import build, load
from outlast.launch.cli import app

RAISES = WORKER.replace("sys.exit(3)", "fail()").replace(
    "import json", 'def fail(): raise ValueError("a bad batch " * 12)\nimport json'
)


def report_of(folder: Path) -> str:
    result = CliRunner().invoke(app, ["report", str(folder)], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())
    return " ".join(result.output.split())


def test_a_restart_of_all_processes_and_its_cause(tmp_path: Path) -> None:
    events = tmp_path / "events"
    options = [
        "--nproc-per-node=2",
        "--max-restarts=1",
        f"--events-dir={events}",
        "--run-id=nightly",
    ]
    with Run(tmp_path, RAISES, *options) as run:
        first = [run.ready(rank) for rank in range(2)]
        first[1].fail()
        second = [run.ready(rank) for rank in range(2)]
        for worker in second:
            worker.succeed()
        assert run.wait() == 0
    report = build(load(events))
    assert (report.source, report.world_size, report.completed) == ("launcher", 2, 2)
    assert (report.run_id, report.command) == ("nightly", str(run.script))
    assert report.stop is None
    (restart,) = report.restarts
    assert restart.cause is not None
    assert (restart.cause.rank, restart.cause.pid) == (1, first[1].pid)
    assert restart.cause.exit == "exit code 1"
    assert restart.cause.message.startswith("ValueError: a bad batch")
    assert restart.resumed
    assert restart.others == (), "the other worker was ended by the launcher"
    (host,) = report.hosts
    assert host.lost.restart > 0
    assert host.productive_seconds > 0
    text = report_of(events)
    assert "2 ranks · 1 host · 1 restart" in text
    assert "As the launcher saw it" in text
    assert "1. Restart of all processes" in text
    where = f"Rank 1 (pid {first[1].pid}, host {restart.cause.host}) ended with exit code 1: "
    assert where + "ValueError: " + ("a bad batch " * 12).strip() in text, "wrapped, not cut"
    assert "2 processes ended with exit code 0." in text


def test_a_death_that_ends_the_job(tmp_path: Path) -> None:
    events = tmp_path / "events"
    with Run(tmp_path, WORKER, "--nproc-per-node=2", f"--events-dir={events}") as run:
        workers = [run.ready(rank) for rank in range(2)]
        workers[0].kill()
        assert run.wait() == 137
    (restart,) = build(load(events)).restarts
    assert restart.cause is not None
    assert (restart.cause.rank, restart.cause.exit) == (0, "killed by SIGKILL")
    assert not restart.resumed
    text = report_of(events)
    assert "1. End of the job" in text
    assert f"Rank 0 (pid {workers[0].pid}, host {restart.cause.host}) was killed by SIGKILL" in text
    assert "No process was started again." in text


def test_sigterm_to_the_launcher_is_a_stop_and_no_restart(tmp_path: Path) -> None:
    events = tmp_path / "events"
    with Run(tmp_path, WORKER, "--nproc-per-node=2", f"--events-dir={events}") as run:
        for rank in range(2):
            run.ready(rank)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143
    report = build(load(events))
    assert report.restarts == ()
    assert report.stop is not None
    assert report.stop.reason == "SIGTERM to the launcher"
    assert report.stop.exits == ("rank 0 (killed by SIGTERM)", "rank 1 (killed by SIGTERM)")
    text = report_of(events)
    assert "0 restarts" in text
    assert "The job was told to stop, " in text


@pytest.mark.slow
def test_without_an_events_folder_the_report_is_beside_the_checkpoints(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    saves = "from outlast import Checkpointer\n"
    saves += f"kept = Checkpointer({str(checkpoints)!r})\nkept.save(1, {{}}).wait()\nprint(json"
    with Run(tmp_path, RAISES.replace("print(json", saves), "--max-restarts=0") as run:
        run.ready(0).fail()
        assert run.wait() == 1
        assert f"these lines and the events: outlast report {checkpoints}" in run.err
    result = CliRunner().invoke(app, ["report", str(checkpoints)], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "ValueError: a bad batch" in text
    assert "Last lines of the launcher: job failed, exit code 1" in text
    assert f", in {checkpoints}." in text
    listed = CliRunner().invoke(app, ["checkpoint", "ls", str(checkpoints)])
    assert listed.exit_code == 0, listed.output
    assert ".events" not in listed.output
