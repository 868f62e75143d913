"""Scripts under a plan: nothing but the faults differs for them, and each fault fires once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from procs import NET_S, Job
from zygote import shared

pytestmark = pytest.mark.usefixtures("zygote")

ECHO = """
import json, sys
if __name__ == "__main__":
    print(json.dumps({"argv": sys.argv, "path": sys.path[0], "file": __file__,
                      "main": sys.modules["__main__"].__dict__ is globals()}))
"""

LOOP = """
import json
from outlast import chaos
for step in range(1, 8):
    chaos.step(step)
    print(json.dumps({"step": step}), flush=True)
"""

SPAWN = """
import json, multiprocessing

def work(connection):
    connection.send(__name__)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=work, args=(there,))
    child.start()
    print(json.dumps({"name": here.recv()}))
    child.join()
"""

FAIL = """
def inner():
    raise ValueError("the script's own")
inner()
"""

BLOCKED = """
import json, time
print(json.dumps({"event": "blocked"}), flush=True)
time.sleep(10_000)
"""


def plan(folder: Path, *faults: dict[str, object]) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps({"faults": list(faults)}))
    return path


def run(
    folder: Path, *arguments: str, faults: Path | None = None
) -> subprocess.CompletedProcess[str]:
    given = faults or plan(folder, {"rank": 9, "kind": "abort"})
    env = {**os.environ, "OUTLAST_CHAOS": str(given), "TMPDIR": str(folder), "RANK": "0"}
    command = [sys.executable, "-m", "outlast.chaos.bootstrap", *arguments]
    return shared().run(command, env, folder, timeout=NET_S)


def test_a_script_runs_as_without_a_plan(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    script = scripts / "echo.py"
    script.write_text(ECHO)
    plain = subprocess.run(
        [sys.executable, "scripts/echo.py", "-m", "x"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=NET_S,
        check=True,
    )
    result = run(tmp_path, "scripts/echo.py", "-m", "x")
    assert result.returncode == 0, result.stderr
    said, wanted = json.loads(result.stdout), json.loads(plain.stdout)
    assert os.path.realpath(said.pop("file")) == os.path.realpath(wanted.pop("file"))
    assert (
        said
        == wanted
        == {"argv": ["scripts/echo.py", "-m", "x"], "path": str(scripts)} | {"main": True}
    )


def test_a_module_runs_as_without_a_plan(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "echo.py").write_text(ECHO)
    result = run(tmp_path, "-m", "pack.echo", "--flag")
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["argv"] == [str(package / "echo.py"), "--flag"]
    assert said["path"] == str(tmp_path)


@pytest.mark.parametrize("form", ["script", "module"])
def test_a_script_may_spawn_processes(tmp_path: Path, form: str) -> None:
    (tmp_path / "spawns.py").write_text(SPAWN)
    result = run(tmp_path, *(["spawns.py"] if form == "script" else ["-m", "spawns"]))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"name": "__mp_main__"}


@pytest.mark.parametrize("form", ["script", "module"])
def test_tracebacks_start_in_the_script(tmp_path: Path, form: str) -> None:
    (tmp_path / "fails.py").write_text(FAIL)
    result = run(tmp_path, *(["fails.py"] if form == "script" else ["-m", "fails"]))
    assert result.returncode == 1
    first, where, *_ = result.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert "fails.py" in where
    assert result.stderr.endswith("ValueError: the script's own\n")
    assert "runpy" not in result.stderr
    assert "bootstrap" not in result.stderr


def test_a_planned_exception_shows_its_line(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    faults = plan(tmp_path, {"rank": 0, "kind": "exception", "step": 3})
    result = run(tmp_path, "loop.py", faults=faults)
    assert result.returncode == 1
    assert result.stdout.count("step") == 2
    assert "loop.py" in result.stderr
    assert "rank 0 fires exception at iteration 0, step 3" in result.stderr
    assert "ChaosError: a planned exception at iteration 0, step 3 (planned-0" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("state", ["given", "derived"])
def test_a_replacement_is_not_killed_by_the_same_fault(tmp_path: Path, state: str) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    faults = plan(tmp_path, {"rank": 0, "kind": "sigkill", "step": 3})
    env = {"OUTLAST_CHAOS": str(faults), "TMPDIR": str(tmp_path)}
    if state == "given":
        env["OUTLAST_CHAOS_STATE"] = str(tmp_path / "state")
    arguments = ["outlast.chaos.bootstrap", str(script)]
    for _ in range(2):  # a second job on the same machine gets the fault again
        with Job(tmp_path, "-m", nprocs=1, env=env, args=arguments) as job:
            job.start_all()
            assert job.wait(0) == -signal.SIGKILL
            job.start(0)
            assert job.wait(0) == 0
            assert [line["step"] for line in job.lines(0)] == [1, 2, *range(1, 8)]
        if state == "given":
            break


@pytest.mark.slow
def test_the_timer_hits_a_blocked_rank(tmp_path: Path) -> None:
    script = tmp_path / "blocked.py"
    script.write_text(BLOCKED)
    faults = plan(tmp_path, {"rank": 0, "kind": "sigkill", "after_seconds": 0.1})
    env = {"OUTLAST_CHAOS": str(faults), "TMPDIR": str(tmp_path)}
    arguments = ["outlast.chaos.bootstrap", str(script)]
    with Job(tmp_path, "-m", nprocs=1, env=env, args=arguments) as job:
        job.start_all()
        assert job.wait(0) == -signal.SIGKILL


@pytest.mark.parametrize("arguments", [(), ("-m",), ("--help",)])
def test_without_a_script_the_usage_is_shown(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = run(tmp_path, *arguments)
    assert result.returncode == 2
    assert "usage:" in result.stderr


def test_an_invalid_plan_is_an_error_of_one_line(tmp_path: Path) -> None:
    result = run(tmp_path, "x.py", faults=plan(tmp_path, {"rank": 0, "kind": "flood"}))
    assert result.returncode == 2
    assert "'flood' - at `$.faults[0].kind`; it must be one of: " in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    result = run(tmp_path, "missing.py")
    assert result.returncode == 2
    assert "can't open file" in result.stderr
    assert "missing.py': No such file" in result.stderr
    result = run(tmp_path, "-m", "missing_module")
    assert result.returncode == 1
    assert "No module named missing_module" in result.stderr
