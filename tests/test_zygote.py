"""A process of the zygote, and a worker of its launcher, are what fresh interpreters would be."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path

import psutil
import pytest

from zygote import Zygote

PROGRAM = """
import atexit, ctypes, sys
class Closed:
    def __del__(self):
        print("released")
kept = Closed()
atexit.register(print, "exit handler")
ctypes.CDLL(None).printf(b"from C\\n")
raise KeyError("at the end") if sys.argv[1:] else SystemExit(3)
"""

LAUNCHER = """
import os, subprocess, sys
from outlast.launch.workers import exec_shim
reader, writer = os.pipe()
command = [*exec_shim.command(), sys.executable, "-u", sys.argv[1], str(writer)]
worker = subprocess.Popen(command, env={**os.environ, "RANK": "7"}, stdin=subprocess.DEVNULL,
                          start_new_session=True, pass_fds=[writer])
os.close(writer)
assert os.read(reader, 100) == b"passed on"
print(worker.wait(), flush=True)
"""

WORKER = """
import json, os, sys, threading, time
os.write(int(sys.argv[1]), b"passed on")
from pathlib import Path
shown = Path("/proc/self/environ").read_bytes().decode().split("\\0")
print(json.dumps({"pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0),
                  "shown": "RANK=7" in shown, "argv": sys.argv, "torch": "torch" in sys.modules}))
if os.environ["STAYS"] == "yes":
    threading.Event().wait()
sys.exit(5)
"""


@pytest.mark.parametrize(("arguments", "code"), [([], 3), (["fails"], 1)])
def test_its_end_is_that_of_python(
    zygote: Zygote, tmp_path: Path, arguments: list[str], code: int
) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = zygote.run([sys.executable, str(script), *arguments])
    assert done.returncode == code
    assert sorted(done.stdout.splitlines()) == ["exit handler", "from C", "released"]
    assert ("KeyError: 'at the end'" in done.stderr) == bool(arguments)
    assert "zygote" not in done.stderr


@pytest.fixture
def launcher(tmp_path: Path) -> list[str]:
    for name, text in (("launcher.py", LAUNCHER), ("worker.py", WORKER)):
        (tmp_path / name).write_text(text)
    return [sys.executable, str(tmp_path / "launcher.py"), str(tmp_path / "worker.py")]


def test_a_worker_is_a_child_of_its_launcher(
    zygote: Zygote, tmp_path: Path, launcher: list[str]
) -> None:
    env = {**os.environ, "STAYS": "no"}
    with zygote.start(launcher, env, workers=True) as process:
        out, err = process.communicate(60)
    assert process.wait() == 0, err
    said, code = out.splitlines()
    assert code == "5"
    worker = json.loads(said)
    assert (worker["parent"], worker["session"]) == (process.pid, worker["pid"])
    assert worker["shown"]
    assert worker["torch"], "it was not forked"
    assert worker["argv"][0] == str(tmp_path / "worker.py")


def test_a_worker_dies_with_its_launcher(zygote: Zygote, launcher: list[str]) -> None:
    env = {**os.environ, "STAYS": "yes"}
    with zygote.start(launcher, env, workers=True) as process:
        assert process.stdout is not None
        worker = json.loads(process.stdout.readline())
        ends = os.pidfd_open(worker["pid"])
        nursery = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGKILL)
        assert select.select([ends], [], [], 60)[0]
        os.close(ends)
    gone, left = psutil.wait_procs(nursery, timeout=60)
    assert not left
    assert len(gone) == 2, "the nursery and the worker"
