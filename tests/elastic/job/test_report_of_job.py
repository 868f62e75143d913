"""The report of real jobs: the redone steps are those that the faults caused."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from outlast.events import CheckpointRestored, StepsDone
from outlast.events.report import build, load
from outlast.events.report.sentences import describe
from procs import Job


def test_redone_steps_are_counted_and_their_time_is_lost(
    ranks: Callable[..., Job], tmp_path: Path
) -> None:
    logs, fails = tmp_path / "events", [4, 9, 14]
    logs.mkdir()
    env = {"OUTLAST_EVENTS_DIR": str(logs)}
    arguments = [str(tmp_path / "checkpoints"), "16", json.dumps(fails)]
    with ranks("redone", *arguments, nprocs=2, env=env) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, [job.errors(rank) for rank in range(2)]
    events = load(logs)
    report = build(events)
    # Saves after every fifth step: steps 1 to 3, 6 to 8 and 11 to 13 were executed twice.
    assert [restart.redone_steps for restart in report.restarts] == [3, 3, 3]
    assert (report.redone_steps, report.steps_from) == (9, "steps")
    assert describe("redone", report)[0] == "9 steps had to be done again, after all restarts."
    (host,) = report.hosts
    lost = dataclasses.asdict(host.lost)
    del lost["replacements"], lost["restart_parts"]  # parts of the restart
    assert host.lost.redone > 0
    assert host.lost.setup > 0
    assert host.lost.saves > 0
    assert host.productive_seconds + sum(lost.values()) == pytest.approx(host.wall_seconds)
    assert report.goodput is not None
    assert report.goodput <= 1 - host.lost.redone / host.wall_seconds
    # Without the events of `Job`, by pings: they count the step in which the fault happened too.
    by_pings = build([event for event in events if not isinstance(event, StepsDone)])
    assert (by_pings.redone_steps, by_pings.steps_from) == (9 + 3, "pings")
    assert by_pings.hosts == report.hosts, "the time is measured without the numbers of steps"


def test_no_step_is_redone_if_a_replica_has_it(ranks: Callable[..., Job], tmp_path: Path) -> None:
    logs = tmp_path / "events"
    logs.mkdir()
    env = {"OUTLAST_EVENTS_DIR": str(logs)}
    with ranks("redone", str(tmp_path / "checkpoints"), "16", "[4, 9]", "live", env=env) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, [job.errors(rank) for rank in range(2)]
    events = load(logs)
    report = build(events)
    assert [restart.redone_steps for restart in report.restarts] == [0, 0]
    assert report.steps_from == "steps"
    restored = [each for each in events if isinstance(each, CheckpointRestored)]
    assert (
        sorted((each.step, each.source) for each in restored)
        == [(3, "live")] * 2 + [(8, "live")] * 2
    )


def test_a_stop_is_not_a_restart_and_loses_no_rank(
    ranks: Callable[..., Job], tmp_path: Path
) -> None:
    logs = tmp_path / "events"
    logs.mkdir()
    env = {"OUTLAST_EVENTS_DIR": str(logs)}
    with ranks("redone", str(tmp_path / "checkpoints"), "1000000", "[]", nprocs=2, env=env) as job:
        job.start_all()
        job.wait_for_line(1, lambda line: line.get("event") == "trains")
        job.send(1, signal.SIGTERM)
        assert job.wait_all() == {0: 143, 1: 143}, [job.errors(rank) for rank in range(2)]
    report = build(load(logs))
    assert report.restarts == ()
    assert report.lost == 0
    assert report.stop is not None
    assert report.stop.reason.startswith("rank 1 on ")
    assert "signal SIGTERM" in report.stop.reason
