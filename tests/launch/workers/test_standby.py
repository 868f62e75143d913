"""Standby processes: they take a dead worker's place, and the script sees no difference."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from launch.runs import WORKER, Ready, Run, ends
from outlast.launch.workers.descendants import kill_group

# What a script can see of its process, except for its numbers.
LOOK = """
import json, os, signal, sys, ctypes, threading, gc
import side

def look():
    signal_number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signal_number))
    return {
        "argv": sys.argv, "path": sys.path, "file": __file__, "name": __name__,
        "main": sys.modules["__main__"].__dict__ is globals(), "package": __package__,
        "cwd": os.getcwd(), "umask": os.umask(0o22), "session": os.getsid(0) == os.getpid(),
        "group": os.getpgid(0) == os.getpid(), "stdin": os.readlink("/proc/self/fd/0"),
        "death": signal_number.value, "threads": len(threading.enumerate()),
        "tasks": len(os.listdir("/proc/self/task")), "gc": gc.get_freeze_count(),
        "signals": {n: str(signal.getsignal(n)).partition(" at ")[0] for n in (2, 10, 13, 15, 17)},
        "descriptors": sorted(os.listdir("/proc/self/fd")), "nice": os.nice(0),
        "flags": str(sys.flags), "buffered": sys.stdout.line_buffering,
        "through": sys.stdout.write_through, "environ": dict(os.environ), "side": side.SEEN,
        "environ_type": type(os.environ).__name__,
    }
"""
SIDE = """
import os, pathlib, sys
SEEN = [sys.argv, sys.path[0], os.environ.get("TMPDIR")]
with pathlib.Path(__file__).with_name("imports.log").open("a") as log:
    log.write(f"{os.getpid()}\\n")
print("side was imported")
"""
# The worker's message follows, with what the script saw.
LOOKER = LOOK + WORKER.replace('"env": env', '"env": env, "saw": look()')
PER_PROCESS = {
    *("OUTLAST_REPLACEMENT", "TORCHELASTIC_ERROR_FILE"),
    "TORCHINDUCTOR_CACHE_DIR",  # set by torch when its compiler is imported, here ahead of time
}


def standby_pid(run: Run, number: int = 0) -> int:
    """The pid of the standby that became ready as number `number`."""
    ready = re.compile(r"standby pid (\d+) is ready")
    run.until(lambda: len(ready.findall(run.err)) > number, f"{number + 1} standbys")
    return int(ready.findall(run.err)[number])


def looked(ready: Ready) -> dict[str, Any]:
    saw: dict[str, Any] = ready.more["saw"]
    saw["environ"] = {k: v for k, v in saw["environ"].items() if k not in PER_PROCESS}
    return saw


@pytest.mark.parametrize("how", ["script", "module", pytest.param("chaos", marks=pytest.mark.slow)])
def test_the_script_sees_no_difference(tmp_path: Path, how: str) -> None:
    (tmp_path / "side.py").write_text(SIDE)
    options = ["--standby=1", "--nproc-per-node=2"]
    if how == "module":
        options.append("-m")
    if how == "chaos":
        (tmp_path / "plan.json").write_text('{"faults": [{"rank": 9, "kind": "abort"}]}')
        options.append(f"--chaos={tmp_path / 'plan.json'}")
    with Run(tmp_path, LOOKER, *options, args=["--a", "b c"], module=how == "module") as run:
        first = run.start_job(2)
        pid = standby_pid(run)
        first[1].kill()
        second = run.ready(1)
        assert second.pid == pid
        assert second.env["OUTLAST_REPLACEMENT"] == "1"
        assert "/attempt_1/1/" in second.env["TORCHELASTIC_ERROR_FILE"]
        assert looked(second) == looked(first[1])
        assert run.complete(first[0], second) == 0
    assert f"rank 1 is now pid {pid}, a standby process" in run.words
    # Imported once in each process, and what it printed is in the worker's output.
    imports = (tmp_path / "imports.log").read_text().split()
    assert sorted(imports) == sorted(str(ready.pid) for ready in (*first, second))
    assert run.out.count("[1] side was imported") == 2


@pytest.mark.slow
def test_several_dead_workers_and_a_successor(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=3", "--standby=2") as run:
        first = run.start_job(3)
        pids = {standby_pid(run, 0), standby_pid(run, 1)}
        first[0].kill()
        first[2].kill()
        zero, two = run.ready(0), run.ready(2)
        assert {zero.pid, two.pid} == pids
        first[1].kill()
        one = run.ready(1)  # none was ready: a new process
        assert one.pid not in pids
        assert standby_pid(run, 2) not in pids
        assert run.complete(zero, one, two) == 0


def test_a_module_that_reads_the_rank_is_left_to_the_script(tmp_path: Path) -> None:
    (tmp_path / "settings.py").write_text('import os\nRANK = int(os.getenv("RANK", "-1"))\n')
    (tmp_path / "side.py").write_text(SIDE)
    script = "import settings\nimport side\n" + WORKER.replace(
        '"env": env', '"env": env, "seen": settings.RANK'
    )
    with Run(tmp_path, script, "--nproc-per-node=2", "--standby=1") as run:
        first = run.start_job(2)
        pid = standby_pid(run)
        # The order may matter: the imports after it are left to the script as well.
        assert str(pid) not in (tmp_path / "imports.log").read_text().split()
        first[1].kill()
        second = run.ready(1)
        assert (second.pid, second.more["seen"]) == (pid, 1)
        assert run.complete(first[0], second) == 0
    text = (
        "standby processes import nothing from here on: `import settings` reads RANK when it is "
        "imported: read it in a function, or move the import to the end; a replacement takes "
        "longer by what that imports"
    )
    assert run.words.count(text) == 1


RANK_ZERO = """
import os
def rank_zero_only(): ...
rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", 0))
with open(os.environ["IMPORTS"], "a") as log:
    log.write(f"{os.getpid()}\\n")
"""


def test_a_framework_is_imported_ahead_and_told_its_rank(tmp_path: Path) -> None:
    """It is imported in a function only, and reads the rank when it is imported."""
    package = tmp_path / "site-packages" / "torchmetrics"
    (package / "utilities").mkdir(parents=True)
    (package / "__init__.py").write_text("from torchmetrics.utilities import prints")
    (package / "utilities" / "__init__.py").touch()
    (package / "utilities" / "prints.py").write_text(RANK_ZERO)
    script = (
        "def seen():\n    import torchmetrics\n"
        "    return torchmetrics.utilities.prints.rank_zero_only.rank\n"
    ) + WORKER.replace('"env": env', '"env": env, "seen": seen()')
    log = tmp_path / "imports.log"
    env = {"PYTHONPATH": str(package.parent), "IMPORTS": str(log)}
    with Run(tmp_path, script, "--nproc-per-node=2", "--standby=1", env=env) as run:
        first = run.start_job(2)
        pid = standby_pid(run)
        assert str(pid) in log.read_text().split()
        first[1].kill()
        second = run.ready(1)
        assert (second.pid, second.more["seen"]) == (pid, 1)
        assert run.complete(first[0], second) == 0


@pytest.mark.slow
def test_what_the_library_imports_on_use_is_imported_ahead(tmp_path: Path) -> None:
    script = (
        "import outlast\n"
        "made = lambda: outlast.Job\n"
        "def seen():\n    import sys\n"
        "    return {'outlast.elastic.job.job', 'encodings.idna'} <= set(sys.modules)\n"
    ) + WORKER.replace('"env": env', '"env": env, "seen": seen()')
    with Run(tmp_path, script, "--nproc-per-node=2", "--standby=1") as run:
        first = run.start_job(2)
        pid = standby_pid(run)
        first[1].kill()
        second = run.ready(1)
        assert (second.pid, first[1].more["seen"], second.more["seen"]) == (pid, False, True)
        assert run.complete(first[0], second) == 0


def test_an_import_that_fails_is_left_to_the_script(tmp_path: Path) -> None:
    script = 'import sys\nsys.modules["later"] = sys\nimport later\nimport json.missing\n'
    with Run(tmp_path, script + WORKER, "--nproc-per-node=2", "--standby=1") as run:
        assert run.wait() == 1  # the workers themselves fail
    assert "ModuleNotFoundError: No module named 'json.missing'" in run.err


def test_a_traceback_begins_with_the_script(tmp_path: Path) -> None:
    script = WORKER.replace("lambda *_: sys.exit(3)", "lambda *_: 1 / 0")
    with Run(tmp_path, script, "--nproc-per-node=2", "--standby=1") as run:
        first = run.start_job(2)
        standby_pid(run)
        first[1].kill()
        second = run.ready(1)
        run.set_job("aborted")
        second.fail()
        first[0].succeed()
        assert run.wait() == 1
    trace = run.err.partition("Traceback (most recent call last):")[2]
    assert str(run.script) in trace.splitlines()[1]
    assert "ZeroDivisionError" in trace


def test_a_standby_that_dies_harms_nothing_and_is_replaced(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2", "--standby=1") as run:
        first = run.start_job(2)
        before = standby_pid(run)
        Ready(before, 9, {}, {}).kill(signal.SIGKILL)
        pid = standby_pid(run, 1)
        assert pid != before
        first[0].kill()
        second = run.ready(0)
        assert second.pid == pid
        assert run.complete(second, first[1]) == 0


def test_what_may_not_be_looked_at_is_not_of_a_dead_workers_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_: int) -> int:
        raise PermissionError  # SELinux, where the container sees the processes of its host

    monkeypatch.setattr(os, "getpgid", refused)
    assert kill_group(1 << 22) == []


def test_a_standby_that_died_unnoticed_is_not_used(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2", "--standby=1") as run:
        first = run.start_job(2)
        pid = standby_pid(run)
        run.process.send_signal(signal.SIGSTOP)  # it learns of both deaths at once
        first[0].kill()
        Ready(pid, 9, {}, {}).kill()
        assert ends(pid)
        run.process.send_signal(signal.SIGCONT)
        second = run.ready(0)
        assert second.pid != pid
        assert run.complete(second, first[1]) == 0


def test_standbys_die_with_a_killed_launcher(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2", "--standby=2") as run:
        run.start_job(2)
        pids = [standby_pid(run, number) for number in range(2)]
        run.process.send_signal(signal.SIGKILL)
        for pid in pids:
            assert ends(pid)


def test_no_standby_for_a_script_without_wrapper(tmp_path: Path) -> None:
    options = ("--nproc-per-node=2", "--standby=1", "--max-restarts=1")
    with Run(tmp_path, WORKER, *options) as run:
        workers = [run.ready(rank) for rank in range(2)]
        workers[0].fail()
        for worker in [run.ready(rank) for rank in range(2)]:
            worker.succeed()
        assert run.wait() == 0
    assert "is ready" not in run.err
