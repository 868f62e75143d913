"""Claims on faults: one process gets each fault, across deaths, in a private directory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from outlast.chaos.fired_faults import Environment, MarkerDirectory, job_directory
from outlast.errors import ChaosError
from procs import NET_S


@pytest.fixture
def fired(tmp_path: Path) -> MarkerDirectory:
    return MarkerDirectory(tmp_path / "state")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Environment(plan=None, state=None, rank=0, job=("id", "host", "29500"))


def test_a_fault_is_claimed_once(fired: MarkerDirectory) -> None:
    assert fired.claim("planned-0", {"time": 2.0})
    assert not fired.claim("planned-0", {"time": 3.0})
    assert fired.claim("planned-1", {"time": 1.0})
    assert fired.records() == [{"time": 1.0}, {"time": 2.0}]


def test_a_claim_is_released(fired: MarkerDirectory) -> None:
    assert fired.claim("planned-0", {})
    fired.release("planned-0")
    assert fired.records() == []
    assert fired.claim("planned-0", {})
    fired.release("never claimed")


CLAIM_ALL = """
import json, os, sys
from outlast.chaos.fired_faults import MarkerDirectory
fired = MarkerDirectory(sys.argv[1])
print(json.dumps({"ready": True}), flush=True)
sys.stdin.readline()
won = [key for key in range(200) if fired.claim(f"planned-{key}", {"pid": os.getpid()})]
print(json.dumps({"won": won}))
"""


def test_one_of_many_processes_claims_each_fault(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLAIM_ALL, str(tmp_path / "state")]
    pipe = subprocess.PIPE
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
            for _ in range(4)
        ]
        for process in processes:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == {"ready": True}
        for process in processes:  # nearly at once
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        won = [json.loads(process.communicate(timeout=NET_S)[0])["won"] for process in processes]
    assert sorted(key for mine in won for key in mine) == list(range(200))


def test_an_unfinished_marker_is_a_claim(tmp_path: Path) -> None:
    fired = MarkerDirectory(tmp_path / "state")
    (fired.path / "planned-0").touch()
    assert not fired.claim("planned-0", {})
    assert fired.records() == []


def test_only_a_private_directory_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    assert MarkerDirectory(state).path.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(state)
    with pytest.raises(ChaosError, match="is a link"):
        MarkerDirectory(tmp_path / "link")
    with pytest.raises(ChaosError, match="No such file"):
        MarkerDirectory(tmp_path / "missing" / "state")
    (tmp_path / "file").touch()
    with pytest.raises(ChaosError, match="File exists"):
        MarkerDirectory(tmp_path / "file")
    state.chmod(0o777)
    with pytest.raises(ChaosError, match="others can write"):
        MarkerDirectory(state)
    state.chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: state.stat().st_uid + 1)
    with pytest.raises(ChaosError, match="another user"):
        MarkerDirectory(state)


def test_the_environment_names_the_directory(environment: Environment, tmp_path: Path) -> None:
    named = dataclasses.replace(environment, state=str(tmp_path / "mine"))
    assert job_directory(named) == tmp_path / "mine"


def test_each_job_has_its_own_directory(environment: Environment, tmp_path: Path) -> None:
    first = job_directory(environment)
    assert first == job_directory(environment)
    assert first.is_relative_to(tmp_path)
    other = dataclasses.replace(environment, job=("id", "host", "29501"))
    assert job_directory(other) != first


def test_directories_of_ended_launchers_are_removed(environment: Environment) -> None:
    mine = MarkerDirectory(job_directory(environment)).path
    ended = subprocess.Popen(["true"])
    ended.wait()
    launcher = mine.name.rpartition("-")[0]
    theirs = [mine.parent / f"{ended.pid}-1-abc", mine.parent / f"{os.getppid()}-1-abc"]
    same = mine.parent / f"{launcher}-abc"
    for path in (*theirs, same):
        MarkerDirectory(path).claim("planned-0", {})
    job_directory(environment)
    assert [path.exists() for path in (*theirs, same, mine)] == [False, False, True, True]
