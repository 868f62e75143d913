"""The end of a terminal (SIGHUP) saves and stops as SIGTERM does; under `nohup` it does nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from outlast.async_checkpoint.storage.directory import list_checkpoints, open_storage, verify
from procs import Job, default_signals, marked

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "terminal.py"
LAUNCH = ("-m", "outlast.launch", "run", "--standby=0", "--nproc-per-node=2")
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A terminal, of which the process that is started is the session leader."""

    def __init__(self) -> None:
        self.ours, self._theirs = os.openpty()
        self.shown = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def spawn(
        self, command: Sequence[str], env: Mapping[str, str], out: Path, err: Path
    ) -> subprocess.Popen[bytes]:
        for file in (out, err):
            file.touch()
        wrapped = [sys.executable, "-c", TAKE_TERMINAL, *command]
        process = subprocess.Popen(
            wrapped,
            env={**env, "PYTHONFAULTHANDLER": "1"},
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
            preexec_fn=default_signals,
        )
        os.close(self._theirs)
        return process

    def until(self, text: str) -> None:
        while text not in self.shown:
            try:
                self.shown += os.read(self.ours, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"ended without {text!r}:\n{self.shown}") from None

    def steps(self) -> int:
        return int(re.findall(r"STEP (\d+)\r", self.shown)[-1])

    def close(self) -> None:
        ours, self.ours = self.ours, -1
        if ours >= 0:
            os.close(ours)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with Terminal() as terminal:
        yield terminal


def saved(path: Path) -> int:
    """The newest step, after all of its files were read."""
    storage = open_storage(str(path))
    step = list_checkpoints(storage)[-1].step
    verify(storage, step)
    return step


def start(tmp_path: Path, terminal: Terminal | None, *command: str) -> Job:
    more = {} if terminal is None else {"spawn": terminal.spawn}
    return Job(tmp_path, command[0], nprocs=1, args=command[1:], **more)


@pytest.mark.parametrize("launched", [False, True])
def test_a_closed_terminal_saves_and_stops(
    terminal: Terminal, tmp_path: Path, launched: bool
) -> None:
    path, events = tmp_path / "checkpoints", tmp_path / "events"
    program = [str(SCRIPT), str(path), str(tmp_path / "done")]
    if launched:
        program = [*LAUNCH, f"--events-dir={events}", *program, "wrapped"]
    with start(tmp_path, terminal, *program) as job:
        job.start_all()
        terminal.until("STEP 3\r\n")
        terminal.close()  # the program still prints: that must not be what ends it
        assert job.wait(0) == (129 if launched else 143)
    assert saved(path) >= 3
    if launched:
        report = [sys.executable, "-m", "outlast.launch", "report", str(events)]
        shown = subprocess.run(report, capture_output=True, text=True, check=True).stdout
        assert "SIGHUP" in shown
        assert "SIGTERM" not in shown


def test_torchrun_forwards_the_end_of_the_terminal(terminal: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    program = (*torchrun, str(SCRIPT), str(path), str(tmp_path / "done"))
    with start(tmp_path, terminal, *program) as job:
        job.start_all()
        terminal.until("STEP 3\r\n")
        job.send(0, signal.SIGHUP)
        terminal.until("stopping after step")
        terminal.until("SignalException")
        job.wait(0)
    assert saved(path) >= 3
    assert re.search(r"stopping after step \d+: rank \d on .*: signal SIGHUP", terminal.shown)


@pytest.mark.parametrize("launched", [False, True])
def test_under_nohup_nothing_stops(terminal: Terminal, tmp_path: Path, launched: bool) -> None:
    path, done = tmp_path / "checkpoints", tmp_path / "done"
    program = [str(SCRIPT), str(path), str(done)]
    if launched:
        program = [*LAUNCH, *program, "wrapped"]
    # As `nohup` does, which would write into its own file.
    ignored = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    ignored += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    with start(tmp_path, terminal, "-c", ignored, *program) as job:
        job.start_all()
        terminal.until("STEP 3\r\n")
        hung_up = marked(job.id)  # workers, monitors, writers, those of the data loaders
        assert len(hung_up) >= (9 if launched else 3), hung_up
        for process in hung_up:
            process.send_signal(signal.SIGHUP)
        terminal.until(f"STEP {terminal.steps() + 20}\r\n")
        assert all(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in hung_up)
        done.touch()
        terminal.until("ENDED")
        if launched:
            terminal.until("job completed")
        assert job.wait(0) == 0, terminal.shown
    assert "stopping" not in terminal.shown
