"""The leak checker detects and names each kind of leak, and waits for what ends by itself."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

import leaks
from leaks import LeakError, Snapshot, no_leaks, settled_leaks

SLEEPER = [sys.executable, "-c", "print(flush=True); input()"]


@contextmanager
def leaked_thread() -> Iterator[str]:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="straggler", daemon=True)
    thread.start()
    yield r"daemon thread 'straggler'"
    release.set()
    thread.join()


@contextmanager
def leaked_file() -> Iterator[str]:
    fd = os.open(__file__, os.O_RDONLY)
    yield rf"file descriptor {fd} -> .*test_leaks\.py"
    os.close(fd)


@contextmanager
def leaked_socket() -> Iterator[str]:
    with socket.socket() as sock:
        yield rf"file descriptor {sock.fileno()} -> socket:"


@contextmanager
def leaked_child() -> Iterator[str]:
    with subprocess.Popen(SLEEPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.read(1)  # a process that has just been executed has no command line yet
        yield rf"child process {child.pid}, .*input"


@contextmanager
def leaked_zombie() -> Iterator[str]:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield rf"child process {child.pid}, zombie"
    child.wait()


@contextmanager
def leaked_signal_handler() -> Iterator[str]:
    before = signal.signal(signal.SIGURG, lambda *_: None)
    yield r"signal handler of SIGURG"
    signal.signal(signal.SIGURG, before)


@contextmanager
def leaked_signal_mask() -> Iterator[str]:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])
    yield r"signal SIGURG left blocked"
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGURG])


def leaked_handler_on(name: str | None, shown: str) -> Callable[[], AbstractContextManager[str]]:
    @contextmanager
    def leak() -> Iterator[str]:
        handler = logging.NullHandler()
        logging.getLogger(name).addHandler(handler)
        yield rf"logging handler .*NullHandler.* on '{shown}'"
        logging.getLogger(name).removeHandler(handler)

    return leak


@pytest.fixture
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "SETTLE_S", 0.0)


@pytest.mark.parametrize(
    "leak",
    [
        pytest.param(leaked_thread, id="thread"),
        pytest.param(leaked_file, id="file"),
        pytest.param(leaked_socket, id="socket"),
        pytest.param(leaked_child, id="child"),
        pytest.param(leaked_zombie, id="zombie"),
        pytest.param(leaked_signal_handler, id="signal-handler"),
        pytest.param(leaked_signal_mask, id="signal-mask"),
        pytest.param(leaked_handler_on(None, "the root logger"), id="root-log-handler"),
        pytest.param(leaked_handler_on("outlast.leaky", "outlast.leaky"), id="log-handler"),
    ],
)
def test_a_leak_is_named(leak: Callable[[], AbstractContextManager[str]]) -> None:
    before = Snapshot.take()
    with leak() as expected:
        (line,) = relevant(before.leaks_in(Snapshot.take()), expected)
        assert re.match(expected, line)
    assert before.leaks_in(Snapshot.take()) == []


def relevant(lines: list[str], expected: str) -> list[str]:
    """All lines except those of a pipe that belongs to the intended leak."""
    return [line for line in lines if "-> pipe:" not in line or expected.startswith("file")]


def test_every_leak_is_named_at_once(no_settling: None) -> None:
    before = Snapshot.take()
    with leaked_thread(), leaked_file(), leaked_signal_handler():
        assert len(before.leaks_in(Snapshot.take())) == 3


def test_a_native_thread_of_torch_is_a_leak() -> None:
    before = Snapshot.take()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert any("native thread 'pt_tcpstore" in line for line in before.leaks_in(Snapshot.take()))
    del store
    assert settled_leaks(before) == []


def test_a_block_that_leaks_raises(no_settling: None) -> None:
    release = threading.Event()
    straggler = threading.Thread(target=release.wait, name="straggler")
    with pytest.raises(LeakError, match="thread 'straggler'"), no_leaks():
        straggler.start()
    release.set()
    straggler.join()


def test_nothing_left_is_no_leak(no_settling: None) -> None:
    with no_leaks(), leaked_file(), leaked_child(), leaked_signal_handler():
        pass


def test_what_is_ending_may_end() -> None:
    going = threading.Event()

    def wind_down() -> None:
        with Path(__file__).open():
            going.set()
            threading.Event().wait(0.05)  # long enough to be seen at the end of the block

    with no_leaks():
        threading.Thread(target=wind_down).start()
        going.wait()


def test_a_descriptor_that_became_another_file_is_a_leak(tmp_path: Path) -> None:
    with leaked_file():
        before = Snapshot.take()
        fd = next(fd for fd, target in before.descriptors.items() if target == __file__)
        with (tmp_path / "other").open("w") as other:
            os.dup2(other.fileno(), fd)
        (line,) = before.leaks_in(Snapshot.take())
        assert line == f"file descriptor {fd} -> {tmp_path / 'other'}"


def test_an_error_in_the_block_is_not_hidden(no_settling: None) -> None:
    with leaked_file(), pytest.raises(ZeroDivisionError), no_leaks():
        _ = 1 / 0


@pytest.mark.slow
def test_every_test_is_checked(tmp_path: Path) -> None:
    """This folder's conftest fails a test that leaks, and no other."""
    (tmp_path / "no_settling.py").write_text("import leaks\nleaks.SETTLE_S = 0\n")
    (tmp_path / "test_leaky.py").write_text(
        "import threading\n"
        "def test_leaky():\n"
        "    threading.Thread(target=threading.Event().wait, name='left', daemon=True).start()\n"
        "def test_tidy():\n"
        "    pass\n"
    )
    plugins = ["-p", "no_settling", "-p", "conftest", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), "."])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "daemon thread 'left'" in run.stdout, run.stdout + run.stderr
    assert "2 passed, 1 error" in run.stdout
