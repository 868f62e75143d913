"""The output of workers: on the console in lines with the rank as prefix, and in files."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.runs import WORKER, Run
from procs import NET_S
from zygote import shared

WRITER = """
import os, sys
rank = os.environ["RANK"]
os.write(1, f"out of {rank}\\n".encode())
os.write(2, f"err of {rank}\\n".encode())
"""
HARD = r"""
import os, sys
os.write(1, b"caf\xc3\xa9 \xff\xfe|\n")
os.write(1, b"10%\r50%\r100%\n")
os.write(1, b"dos\r\n")
os.write(1, b"x" * 200_000 + b"|\n")
os.write(1, b"no end")
os.write(2, b"no end either")
"""


def log(tmp_path: Path, rank: int, name: str, start: int = 0) -> Path:
    return tmp_path / "logs" / "r1" / f"attempt_{start}" / str(rank) / name


def test_lines_carry_the_rank(tmp_path: Path) -> None:
    with Run(tmp_path, WRITER, "--nproc-per-node=2") as run:
        assert run.wait() == 0
    assert sorted(run.out.splitlines()) == ["[0] out of 0", "[1] out of 1"]
    assert sorted(run.worker_errors) == ["[0] err of 0", "[1] err of 1"]


def test_any_bytes_of_workers_come_out_as_lines_of_utf8(tmp_path: Path) -> None:
    with Run(tmp_path, HARD) as run:
        assert run.wait() == 0
    first, bar, dos, *long, last = run.out.splitlines()
    assert first == r"[0] café \xff\xfe|"
    assert bar == "[0] 100%"
    assert dos == "[0] dos"
    assert "".join(line.removeprefix("[0] ") for line in long) == "x" * 200_000 + "|"
    assert last == "[0] no end"
    assert run.worker_errors == ["[0] no end either"]


def test_a_line_without_an_end_is_shown_when_its_worker_dies(tmp_path: Path) -> None:
    script = "import os, signal\nos.write(1, b'last words')\nos.kill(os.getpid(), signal.SIGKILL)"
    with Run(tmp_path, script) as run:
        assert run.wait() == 137
    assert run.out == "[0] last words\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "console", "files"),
    [
        ([], {"out0", "out1", "err0", "err1"}, {"out0", "out1", "err0", "err1"}),
        (["-r", "3"], set(), {"out0", "out1", "err0", "err1"}),
        (["--redirects=0:1,1:2"], {"err0", "out1"}, {"out0", "err1"}),
        (["-t", "1"], {"out0", "out1", "err0", "err1"}, {"out0", "out1"}),
        (["-r=3", "--tee=0:2"], {"err0"}, {"out0", "out1", "err0", "err1"}),
        (["--local-ranks-filter=1"], {"out1", "err1"}, {"out0", "out1", "err0", "err1"}),
    ],
)
def test_files_and_console(
    tmp_path: Path, options: list[str], console: set[str], files: set[str]
) -> None:
    options = ["--nproc-per-node=2", "--log-dir=logs", "--run-id=r1", *options]
    with Run(tmp_path, WRITER, *options) as run:
        assert run.wait() == 0
    shown = {f"out{line[-1]}" for line in run.out.splitlines()}
    shown |= {f"err{line[-1]}" for line in run.worker_errors}
    assert shown == console
    written = set()
    for rank in range(2):
        for name in ("out", "err"):
            path = log(tmp_path, rank, f"std{name}.log")
            if path.exists():
                assert path.read_text() == f"{name} of {rank}\n"
                written.add(f"{name}{rank}")
    assert written == files


def test_files_get_the_bytes_as_they_are(tmp_path: Path) -> None:
    with Run(tmp_path, HARD, "--log-dir=logs", "--run-id=r1") as run:
        assert run.wait() == 0
    data = log(tmp_path, 0, "stdout.log").read_bytes()
    assert data.startswith(b"caf\xc3\xa9 \xff\xfe|\n10%\r50%\r100%\ndos\r\nxxx")
    assert data.endswith(b"x|\nno end")


def test_every_process_of_a_rank_has_files_of_its_own(tmp_path: Path) -> None:
    options = ["--nproc-per-node=2", "--log-dir=logs", "--run-id=r1", "--tee=3"]
    with Run(tmp_path, WORKER, *options) as run:
        first = run.start_job(2)
        first[1].kill()
        second = run.ready(1)
        assert run.complete(first[0], second) == 0
    for ready, start in ((first[0], 0), (first[1], 0), (second, 1)):
        text = log(tmp_path, ready.rank, "stdout.log", start).read_text()
        assert json.loads(text)["pid"] == ready.pid


def test_files_without_a_folder_are_kept_in_one_that_is_named(tmp_path: Path) -> None:
    with Run(tmp_path, WRITER, "--redirects=3") as run:
        assert run.wait() == 0
    said = run.words[0]
    folder = Path(said.removeprefix("output files are in "))
    assert (folder / "attempt_0" / "0" / "stdout.log").read_text() == "out of 0\n"


@pytest.mark.slow
def test_a_slow_reader_blocks_workers_and_not_the_launcher(tmp_path: Path) -> None:
    # Rank 0 writes much more than is read here, until rank 1's death has been handled.
    flood = """if env["RANK"] == "0":
    for _ in range(400): os.write(1, b"y" * 9_999 + b"\\n")
"""
    script = WORKER.replace("while True:", flood + "while True:")
    with Run(tmp_path, script, "--nproc-per-node=2", "--log-dir=logs", "--run-id=r1") as run:
        first = run.start_job(2)
        first[1].kill()
        # Seen not on the console, which is full of rank 0, but in the file of the new process.
        path = log(tmp_path, 1, "stdout.log", 1)
        second = json.loads(first_write(path))
        run.set_job("completed")
        os.kill(second["pid"], 10)
        run.until(lambda: run.out.count("y" * 9_999) == 400, "all that rank 0 wrote")
        first[0].succeed()
        assert run.wait() == 0


def first_write(path: Path) -> str:
    """What another process writes first to a file that need not be there yet.

    Not a line: Python writes its end apart, and in this test that stays unread.
    """
    command = ["tail", "--retry", "-n", "+1", "-F", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tail:
        assert tail.stdout is not None
        assert select.select([tail.stdout], [], [], NET_S)[0]
        data = os.read(tail.stdout.fileno(), 65536)
        tail.kill()
    return data.decode()


def test_output_without_a_reader(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=1") as run:
        worker = run.ready(0)
        assert run.process.stdout is not None
        run._selector.unregister(run.process.stdout)
        run.process.stdout.close()
        run.set_job("running")
        worker.succeed()
        assert run.wait() == 0


def test_on_a_terminal_the_prefix_has_a_colour(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WRITER)
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "outlast.launch", "run", "script.py"]
    process = shared().start(command, environment, tmp_path, stdout=theirs, stderr=theirs)
    try:
        assert process.wait(NET_S) == 0
        text = os.read(ours, 65536).decode()
    finally:
        process.send_signal(signal.SIGTERM)  # an orderly stop of the job, if it has not ended
        process.wait()
        os.close(ours)
        os.close(theirs)
    lines = text.splitlines()
    assert lines[1:-1] == ["\x1b[36m[0]\x1b[0m out of 0", "\x1b[36m[0]\x1b[0m err of 0"]
    for line in (lines[0], lines[-1]):
        assert line.startswith("\x1b[1m[outlast]\x1b[0m ")  # bold; red only if the job has failed
