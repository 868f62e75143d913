"""Jobs start, print, are replaced, and leave no process behind, even one that escaped."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

import procs
from procs import Job, free_port

SPEAKER = """
import json, os, sys
print("not for machines")
print(json.dumps({"rank": int(os.environ["RANK"]), "extra": os.environ.get("EXTRA")}))
if sys.argv[1:] == ["stay"]:
    import threading
    threading.Event().wait()
"""

RUNAWAY = """
import json, os, threading
end, beginning = os.pipe()
if os.fork() == 0:
    os.setsid()
    print(json.dumps({"pid": os.getpid()}), flush=True)
    os.write(beginning, b"printed")
    threading.Event().wait()
os.read(end, 1)  # the rank ends after the line is there
"""


@pytest.fixture
def speaker(tmp_path: Path) -> Path:
    path = tmp_path / "speaker.py"
    path.write_text(SPEAKER)
    return path


@pytest.fixture
def no_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procs, "LINGER_S", 0.5)


def test_ranks_speak_and_end(tmp_path: Path, speaker: Path) -> None:
    with Job(tmp_path, speaker, nprocs=2, env={"EXTRA": "all"}) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}
        assert job.lines(0) == [{"rank": 0, "extra": "all"}]
        assert job.lines(1) == [{"rank": 1, "extra": "all"}]
        assert job.output(1).startswith("not for machines\n")


def test_a_killed_rank_is_replaced(tmp_path: Path, speaker: Path) -> None:
    with Job(tmp_path, speaker, nprocs=1, args=["stay"]) as job:
        job.start_all()
        job.wait_for_line(0, lambda line: line["rank"] == 0)
        job.kill(0)
        assert job.wait_all() == {0: -signal.SIGKILL}
        job.start(0, env={"EXTRA": "second"})
        job.wait_for_line(0, lambda line: line["extra"] == "second")
        assert len(job.lines(0)) == 2


def test_what_still_runs_is_killed_at_the_end(tmp_path: Path, speaker: Path) -> None:
    with Job(tmp_path, speaker, nprocs=2, args=["stay"]) as job:
        job.start_all()
        job.wait_for_line(1, lambda line: True)
        pids = [job.pid(0), job.pid(1)]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_child_that_ran_away_is_found_and_killed(tmp_path: Path, no_lingering: None) -> None:
    script = tmp_path / "runaway.py"
    script.write_text(RUNAWAY)
    job = Job(tmp_path, script, nprocs=1)
    with pytest.raises(AssertionError, match="outlived their job") as caught, job:
        job.start_all()
        assert job.wait(0) == 0
        runaway = psutil.Process(job.wait_for_line(0, lambda line: "pid" in line)["pid"])
    assert str(runaway.pid) in str(caught.value)
    assert not runaway.is_running() or runaway.status() == psutil.STATUS_ZOMBIE


def test_the_error_of_the_block_comes_first(tmp_path: Path, no_lingering: None) -> None:
    script = tmp_path / "runaway.py"
    script.write_text(RUNAWAY)
    with pytest.raises(ZeroDivisionError), Job(tmp_path, script, nprocs=1) as job:
        job.start_all()
        job.wait_for_line(0, lambda line: "pid" in line)
        _ = 1 / 0


def test_a_rank_that_hangs_shows_where(tmp_path: Path, speaker: Path) -> None:
    with Job(tmp_path, speaker, nprocs=1, args=["stay"]) as job:
        job.start_all()
        job.wait_for_line(0, lambda line: True)
        with pytest.raises(AssertionError, match=r"still running(.|\n)*speaker\.py"):
            job.wait_all(timeout=0)


def test_a_line_that_never_comes_fails_at_the_end_of_its_rank(
    tmp_path: Path, speaker: Path
) -> None:
    with Job(tmp_path, speaker, nprocs=1) as job:
        job.start_all()
        with pytest.raises(AssertionError, match=r"ended without(.|\n)*not for machines"):
            job.wait_for_line(0, lambda line: line["rank"] == 7)


def test_ports_are_not_given_twice() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert max(ports) < 32_768
