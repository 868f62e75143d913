"""Lines without an end (progress bars, prompts): in place on a terminal, now and then in a log."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fake_clock import FakeClock
from launch.runs import Run
from outlast.launch.event_loop import EventLoop
from outlast.launch.workers.output import STATE_S, Capture, Outlet
from procs import NET_S

# What tqdm writes: each state is one write that begins with a carriage return.
BAR = r"""
import os, signal, sys
woken, wakes = os.pipe()
os.set_blocking(wakes, False)
signal.set_wakeup_fd(wakes)
signal.signal(signal.SIGUSR1, lambda *_: None)
rank = os.environ["RANK"]
os.write(1, f"process {os.getpid()}\n".encode())
for state in (" 10%|#   |", " 20%|##  |", " a state longer than the terminal is wide 0123456789"):
    os.write(2, f"\r{state}".encode())
    os.read(woken, 1)
os.write(1, b"a line between\n")
os.read(woken, 1)
os.write(2, b"\r100%|####|\nname? ")
os.read(woken, 1)
os.write(2, b"outlast\n")
"""
COLUMNS = 40


class Terminal:
    """What a user sees: the rows of a terminal, of the control sequences that are used here."""

    def __init__(self, fd: int) -> None:
        self.fd, self.rows, self.row, self.column = fd, [""], 0, 0

    def until(self, shown: Callable[[list[str]], object]) -> None:
        while not shown(self.rows):
            self.feed(os.read(self.fd, 65536).decode())

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self.row += 1
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif part == "\x1b[A":
                self.row -= 1
            elif part == "\x1b[J":
                self.rows[self.row] = self.rows[self.row][: self.column]
                del self.rows[self.row + 1 :]
            elif part[0] != "\x1b":
                before = self.rows[self.row].ljust(self.column)
                self.column += len(part)
                self.rows[self.row] = before[: self.column - len(part)] + part
                assert len(self.rows[self.row]) < COLUMNS or "[outlast]" in self.rows[self.row]


@pytest.mark.slow
def test_a_terminal_shows_the_bars_of_all_ranks_in_place(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BAR)
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "cols", str(COLUMNS), "rows", "24"], stdin=theirs, check=True)
    command = [sys.executable, "-m", "outlast.launch", "run", "--nproc-per-node=2", "script.py"]
    streams = {"stdin": subprocess.DEVNULL, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen(command, cwd=tmp_path, **streams)  # type: ignore[call-overload]
    screen = Terminal(ours)

    def go_on(*ranks: int) -> None:
        for rank in ranks:
            os.kill(pids[rank], signal.SIGUSR1)

    try:
        screen.until(lambda rows: sorted(rows[-2:]) == ["[0]  10%|#   |", "[1]  10%|#   |"])
        found = re.findall(r"\[(\d)\] process (\d+)", "\n".join(screen.rows))
        pids = {int(rank): int(pid) for rank, pid in found}
        go_on(1)
        screen.until(lambda rows: sorted(rows[-2:]) == ["[0]  10%|#   |", "[1]  20%|##  |"])
        go_on(0, 1)
        cut = "[1]  a state longer than the terminal is wide 0123456789"[: COLUMNS - 1]
        screen.until(lambda rows: sorted(rows[-2:]) == ["[0]  20%|##  |", cut])
        go_on(1)
        # The line goes above the bars, which stay.
        screen.until(lambda rows: "[1] a line between" in rows[:-2])
        screen.until(lambda rows: sorted(rows[-2:]) == ["[0]  20%|##  |", cut])
        go_on(1)
        screen.until(lambda rows: sorted(rows[-2:]) == ["[0]  20%|##  |", "[1] name?"])
        assert screen.rows[-3] == "[1] 100%|####|"
        go_on(1)
        screen.until(lambda rows: "[1] name? outlast" in rows)
        for state in (" a state", "a line between", "name?"):
            go_on(0)
            screen.until(lambda rows, state=state: any(f"[0] {state}" in row for row in rows))
        go_on(0)
        screen.until(lambda rows: "job completed" in rows[-2])
        assert process.wait(NET_S) == 0
        assert sum("%|" in row for row in screen.rows) == 2  # the last state of each
    finally:
        process.terminate()
        process.wait()
        os.close(ours)
        os.close(theirs)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def loop(clock: FakeClock) -> Iterator[EventLoop]:
    with EventLoop(clock=clock) as loop:
        yield loop


def test_a_log_has_the_state_every_few_seconds_and_the_last_one(
    loop: EventLoop, clock: FakeClock
) -> None:
    log, console = os.pipe()
    read, worker = os.pipe()
    outlet = Outlet(loop, console)
    capture = Capture(loop, read, b"[0] ", outlet, None)

    def write(data: bytes) -> None:
        os.write(worker, data)
        loop.run_once()

    def written() -> bytes:
        os.write(console, b".")  # so that the read never waits
        return os.read(log, 65536)[:-1]

    for percent in range(10):
        write(b"\r%d%%" % percent)
    assert written() == b""
    clock.advance(STATE_S)
    write(b"\r50%")
    assert written() == b"[0] 50%\n"
    clock.advance(STATE_S)
    write(b"\r50%")  # no other state than before
    write(b"\r60%")
    clock.advance(STATE_S / 2)
    write(b"\r70%")
    assert written() == b""
    clock.advance(STATE_S / 2)
    loop.run_once()
    assert written() == b"[0] 70%\n"
    write(b"\n")
    assert written() == b""  # it is there already
    write(b"\r90%")
    write(b"\r100%\nloss ")
    assert written() == b"[0] 100%\n"
    clock.advance(STATE_S)
    loop.run_once()
    assert written() == b"[0] loss \n"
    write(b"0.5\n")
    assert written() == b"[0] loss 0.5\n"
    assert list(capture.last) == ["70%", "100%", "loss 0.5"]
    capture.close()
    for fd in (log, console, worker):
        os.close(fd)


def test_bars_below_one_another_are_one_line(loop: EventLoop, clock: FakeClock) -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    log, console = os.pipe()
    read, worker = os.pipe()
    capture = Capture(loop, read, b"[0] ", Outlet(loop, console), None)
    options = {"file": os.fdopen(worker, "w"), "mininterval": 0, "ascii": True}
    before, tqdm.monitor_interval = tqdm.monitor_interval, 0  # without its thread
    for _ in tqdm(range(3), desc="epoch", **options):
        for _ in tqdm(range(20), desc="step", leave=False, **options):
            loop.run_once()
    options["file"].write("a line\n")
    options["file"].close()
    capture.drain()
    tqdm.monitor_interval = before
    epochs, line = os.read(log, 65536).decode().splitlines()
    assert epochs.startswith("[0] epoch: 100%|")
    assert line == "[0] a line"
    os.close(log)
    os.close(console)


WITH_TQDM = """
from tqdm import tqdm
import outlast.inprocess as inprocess

@inprocess.Wrapper()
def train(call: inprocess.CallWrapper):
    for n in tqdm(range(4), desc=f"iteration {call.iteration}", mininterval=0):
        if n == 2 and call.iteration == 0:
            raise ValueError("planned")

train()
"""


def test_a_restart_begins_a_new_line_after_a_bar_of_tqdm(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    with Run(tmp_path, WITH_TQDM) as run:
        assert run.wait() == 0
    bars = [line for line in run.worker_errors if "iteration " in line and "it/s]" in line]
    restarts = [line for line in run.worker_errors if "restart of iteration 0" in line]
    assert [line[:16] for line in bars] == ["[0] iteration 0:", "[0] iteration 1:"]
    assert len(restarts) == 1
    assert restarts[0].startswith("[0] restart of iteration 0")
