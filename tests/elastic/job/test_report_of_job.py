"""Real jobs that repeat steps after faults: their report, and what is no progress."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outlast.events.report import build, load
from outlast.events.report.sentences import describe
from outlast.events.types import CheckpointRestored, StepsDone
from procs import Job


@contextlib.contextmanager
def redone(ranks: Callable[..., Job], folder: Path, *arguments: str) -> Iterator[Job]:
    """A running job, whose events are in `folder`."""
    env = {"OUTLAST_EVENTS_DIR": str(folder)}
    with ranks("redone", str(folder / "checkpoints"), *arguments, env=env) as job:
        job.start_all()
        yield job


@pytest.mark.slow
def test_redone_steps_are_counted_and_their_time_is_lost(
    ranks: Callable[..., Job], tmp_path: Path
) -> None:
    with redone(ranks, tmp_path, "16", "[4, 9, 14]") as job:
        assert job.wait_all() == {0: 0, 1: 0}, [job.errors(rank) for rank in range(2)]
    events = load(tmp_path)
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
    with redone(ranks, tmp_path, "16", "[4, 9]", "live") as job:
        assert job.wait_all() == {0: 0, 1: 0}, [job.errors(rank) for rank in range(2)]
    events = load(tmp_path)
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
    with redone(ranks, tmp_path, "1000000", "[]") as job:
        job.wait_for_line(1, lambda line: line.get("event") == "trains")
        job.send(1, signal.SIGTERM)
        assert job.wait_all() == {0: 143, 1: 143}, [job.errors(rank) for rank in range(2)]
    report = build(load(tmp_path))
    assert report.restarts == ()
    assert report.lost == 0
    assert report.stop is not None
    assert report.stop.reason.startswith("rank 1 on ")
    assert "signal SIGTERM" in report.stop.reason


@pytest.mark.slow
def test_equal_faults_before_the_furthest_step_end_the_job(
    ranks: Callable[..., Job], tmp_path: Path
) -> None:
    # Every iteration makes more pings than none, and no step beyond the seventh.
    with redone(ranks, tmp_path, "16", "[8, 7, 8, 9, 10]") as job:
        assert job.wait_all() == {0: 93, 1: 93}, [job.errors(rank) for rank in range(2)]
        assert "3 equal faults without progress in between" in job.errors(1)
        assert "RuntimeError: a planned exception" in job.errors(1)
        assert not any(line["event"] == "ended" for line in job.lines(0))


def test_what_was_not_run_after_a_step_is_named_at_each_restore(
    ranks: Callable[..., Job], tmp_path: Path
) -> None:
    with redone(ranks, tmp_path, "8", "[6, 8]", "live") as job:
        assert job.wait_all() == {0: 0, 1: 0}, job.errors(0)
        what = r"what stands after job\.step\(\) at redone\.py:\d+ was not run for step (\d+)"
        assert re.findall(what, job.errors(0)) == ["5", "7"]
        assert not re.search(what, job.errors(1))
