"""Behavior specific to each kind of background process."""

from __future__ import annotations

import gc
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_checkpoint.calls import work
from async_checkpoint.calls.work import Gate
from outlast.async_checkpoint import AsyncCallsQueue, AsyncRequest, DistributedAsyncCaller
from outlast.async_checkpoint.calls.runners import ForkRunner, Outcome, WorkerRunner
from outlast.errors import AsyncCallError

NET_S = 120.0


class Ends:
    """The calls that have ended, and how."""

    def __init__(self) -> None:
        self.queue: queue.Queue[tuple[int, Outcome]] = queue.Queue()

    def __call__(self, index: int, outcome: Outcome) -> None:
        self.queue.put((index, outcome))


def forks() -> ForkRunner:
    return ForkRunner(Ends(), nice=0)


def collected(runner: Any, count: int) -> dict[int, Outcome]:
    """Waits until this many calls have ended."""
    return dict(runner._ended.queue.get(timeout=NET_S) for _ in range(count))


# -- a fork for each call ----------------------------------------------------------------------


def test_a_closure_and_whatever_cannot_be_pickled(tmp_path: Path) -> None:
    runner, lock = forks(), threading.Lock()

    def closure() -> None:
        with lock:
            (tmp_path / "out").write_text("done")

    runner.start(0, closure, (), {})
    assert collected(runner, 1) == {0: Outcome()}
    assert (tmp_path / "out").read_text() == "done"


def test_forks_run_side_by_side(tmp_path: Path) -> None:
    runner, gates = forks(), [Gate(tmp_path, str(i)) for i in range(3)]
    for index, gate in enumerate(gates):
        runner.start(index, gate.wait_in_call, (), {})
    pids = [gate.arrived() for gate in gates]
    assert len(set(pids)) == 3
    assert collected(runner, 0) == {}
    gates[1].open()
    assert collected(runner, 1) == {1: Outcome()}
    runner.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_fork_has_none_of_the_parents_connections(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        runner, gate = forks(), Gate(tmp_path)
        runner.start(0, gate.wait_in_call, (), {})
        gate.arrived()
        accepted.close()
        assert client.recv(1) == b"", "the parent's end is the end"
        address = server.getsockname()
        server.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address).close()
        gate.open()
        assert collected(runner, 1) == {0: Outcome()}


@pytest.mark.slow
def test_output_is_written_once(tmp_path: Path) -> None:
    code = (
        "from outlast.async_checkpoint import AsyncCallsQueue, AsyncRequest\n"
        "print('before', end='')\n"
        "import atexit; atexit.register(lambda: print('at exit'))\n"
        "with AsyncCallsQueue() as queue:\n"
        "    queue.schedule_async_request(AsyncRequest(print, ('in the call',), []))\n"
        "print('after')\n"
    )
    path = tmp_path / "out"
    with path.open("wb") as out:
        subprocess.run([sys.executable, "-W", "error", "-c", code], stdout=out, check=True)
    assert path.read_text() == "beforein the call\nafter\nat exit\n"


def test_a_child_of_a_call_that_lives_on_holds_up_nothing(tmp_path: Path) -> None:
    def starts_another() -> None:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        (tmp_path / "pid").write_text(str(child.pid))

    runner = forks()
    runner.start(0, starts_another, (), {})
    assert collected(runner, 1) == {0: Outcome()}
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_program_that_ignores_the_end_of_its_children(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        runner, gates = forks(), [Gate(tmp_path, "0"), Gate(tmp_path, "1")]
        runner.start(0, gates[0].wait_in_call, (), {})
        runner.start(1, lambda: gates[1].wait_in_call() or os._exit(0), (), {})
        for gate in gates:
            gate.arrived()
            gate.open()
        found = collected(runner, 2)
        assert found[0] == Outcome()
        assert found[1].cause is not None, "nobody knows that all was well"
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_an_exception_without_end_is_cut(tmp_path: Path) -> None:
    def verbose() -> None:
        raise ValueError("x" * 1_000_000)

    runner = forks()
    runner.start(0, verbose, (), {})
    assert len(collected(runner, 1)[0].encode()) < 50_000


# -- one worker for all calls ------------------------------------------------------------------


@pytest.fixture
def worker() -> Iterator[WorkerRunner]:
    runner = WorkerRunner(Ends(), nice=0)  # normal priority: other work would delay the test
    yield runner
    runner.close()


def test_one_process_runs_all_calls_in_order(worker: WorkerRunner, tmp_path: Path) -> None:
    for index in range(3):
        worker.start(index, work.append_pid, (tmp_path / "pids",), {})
    assert list(collected(worker, 3)) == [0, 1, 2]
    assert set((tmp_path / "pids").read_text().split()) == {str(worker.pid)}


def test_a_killed_worker_takes_one_call_with_it(worker: WorkerRunner, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    worker.start(0, work.part, (gate,), {})
    worker.start(1, work.append_pid, (tmp_path / "pids",), {})
    pid = gate.arrived()
    os.kill(pid, signal.SIGKILL)
    outcomes = collected(worker, 2)
    assert outcomes[0].cause == "its process was killed by SIGKILL"
    assert outcomes[1] == Outcome()
    assert worker.pid not in (pid, None)
    assert (tmp_path / "pids").read_text() == f"{worker.pid}\n"


def test_a_worker_that_dies_between_calls_is_started_again(
    worker: WorkerRunner, tmp_path: Path
) -> None:
    worker.start(0, work.append_pid, (tmp_path / "pids",), {})
    collected(worker, 1)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(worker.pid)], timeout=0)
    assert worker._worker is not None
    worker._worker.wait()
    worker.start(1, work.append_pid, (tmp_path / "pids",), {})
    assert collected(worker, 1) == {1: Outcome()}
    assert len(set((tmp_path / "pids").read_text().split())) == 2


def test_a_call_that_closes_the_channel_ends_the_worker(
    worker: WorkerRunner, tmp_path: Path
) -> None:
    worker.start(0, work.close_everything, (), {})
    assert collected(worker, 1)[0].cause is not None
    worker.start(1, work.append_pid, (tmp_path / "pids",), {})
    assert collected(worker, 1) == {1: Outcome()}


@pytest.mark.parametrize("what", ["function", "argument"])
def test_what_cannot_be_pickled_is_refused_when_it_is_scheduled(
    worker: WorkerRunner, what: str
) -> None:
    with pytest.raises(TypeError, match=r"takes|lambda") as caught:
        if what == "function":
            worker.start(0, lambda: None, (), {})
        else:
            worker.start(0, work.takes, (threading.Lock(),), {})
    assert "persistent worker" in str(caught.value)
    assert worker.pid is None


def test_what_cannot_be_unpickled_is_a_failed_call(worker: WorkerRunner) -> None:
    worker.start(0, work.takes, (work.Unreadable(),), {})
    cause = collected(worker, 1)[0].cause
    assert cause is not None
    assert "cannot be unpickled in the worker: RuntimeError: not here" in cause


@pytest.mark.slow
def test_a_program_that_reads_its_arguments_when_it_is_imported(tmp_path: Path) -> None:
    program = tmp_path / "arguments.py"
    program.write_text(
        "import sys\n"
        "from outlast.async_checkpoint import AsyncCallsQueue, AsyncRequest\n"
        "WHERE = sys.argv[1]\n"
        "def save(): open(WHERE, 'w').close()\n"
        "if __name__ == '__main__':\n"
        "    queue = AsyncCallsQueue(persistent=True)\n"
        "    queue.schedule_async_request(AsyncRequest(save, (), []))\n"
        "    queue.close()\n"
    )
    subprocess.run([sys.executable, program, tmp_path / "saved"], check=True)
    assert (tmp_path / "saved").exists()


@pytest.mark.slow
def test_a_program_without_the_guard_is_told(tmp_path: Path) -> None:
    program = tmp_path / "unguarded.py"
    program.write_text(
        "from outlast.async_checkpoint import AsyncCallsQueue, AsyncRequest\n"
        "def save(): pass\n"
        "queue = AsyncCallsQueue(persistent=True)\n"
        "queue.schedule_async_request(AsyncRequest(save, (), []))\n"
        "queue.close()\n"
    )
    result = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert result.returncode == 1
    assert 'must stand under `if __name__ == "__main__":`' in result.stderr


# -- the caller --------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_a_caller(persistent: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caller, gate = DistributedAsyncCaller(persistent, nice=0), Gate(tmp_path)
    assert caller.is_current_async_call_done()
    caller.schedule_async_call(None, ())
    assert caller.is_current_async_call_done(no_dist=False)
    caller.schedule_async_call(
        work.wait_then_write, (gate,), {"path": tmp_path / "o", "values": []}
    )
    gate.arrived()
    assert not caller.is_current_async_call_done()
    assert caller.process is not None
    assert caller.process.is_running()
    assert caller.start_time is not None
    caller.schedule_async_call(None, ())
    caller.schedule_async_call(work.end_by, ["exit"], save_kwargs=None)  # type: ignore[arg-type]
    assert not caller.is_current_async_call_done()  # the first one is not
    gate.open()
    with pytest.raises(AsyncCallError, match="code 3"):
        caller.is_current_async_call_done(blocking=True)
    assert (tmp_path / "o").exists()
    assert caller.is_current_async_call_done()
    assert (caller.process, caller.start_time) == (None, None)
    caller.schedule_async_call(work.end_by, ("exit",))
    with pytest.raises(AsyncCallError, match="code 3"):
        caller.is_current_async_call_done(blocking=True)
    caller.schedule_async_call(work.end_by, ("exit",))
    caller.schedule_async_call(work.end_by, ("exception",))
    with pytest.raises(AsyncCallError, match="code 3"):
        caller.is_current_async_call_done(blocking=True)
    assert "another background call failed, too: " in caplog.text
    assert "the disk is full of ideas" in caplog.text
    assert caller.is_current_async_call_done()
    caller.close()


# -- the request -------------------------------------------------------------------------------


def test_a_request_is_what_users_know() -> None:
    assert AsyncRequest._fields == (
        "async_fn",
        "async_fn_args",
        "finalize_fns",
        "async_fn_kwargs",
        "is_frozen",
    )
    assert AsyncRequest._field_defaults == {"async_fn_kwargs": {}, "is_frozen": False}


def test_a_frozen_request_takes_no_more_functions() -> None:
    request = AsyncRequest(None, (), [])
    request.add_finalize_fn(list)
    frozen = request.freeze()
    assert frozen == request._replace(is_frozen=True)
    assert not request.is_frozen
    with pytest.raises(RuntimeError, match="frozen"):
        frozen.add_finalize_fn(list)
    assert frozen.finalize_fns == [list]


def test_execute_sync_does_the_same_here(tmp_path: Path) -> None:
    ran: list[str] = []
    arguments = {"text": "both"}
    then = [lambda: ran.append((tmp_path / "o").read_text()), lambda: ran.append("second")]
    AsyncRequest(work.write, (tmp_path / "o",), then, arguments).execute_sync()
    assert ran == ["both", "second"]
    AsyncRequest(None, (), then).execute_sync()
    assert len(ran) == 4
    with pytest.raises(ValueError, match="ideas"):
        AsyncRequest(work.end_by, ("exception",), then).execute_sync()
    assert len(ran) == 4


def test_two_queues_are_two_worlds(tmp_path: Path) -> None:
    with AsyncCallsQueue() as one, AsyncCallsQueue() as other:
        one.schedule_async_request(AsyncRequest(work.end_by, ("exit",), []))
        other.schedule_async_request(AsyncRequest(work.write, (tmp_path / "o", ""), []))
        with pytest.raises(AsyncCallError):
            one.maybe_finalize_async_calls(blocking=True)
        assert other.maybe_finalize_async_calls(blocking=True) == [0]
    gc.collect()


def test_a_fork_that_another_thread_kills_while_it_starts_does_not_go_on() -> None:
    ended: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    runner = ForkRunner(lambda index, outcome: ended.put(outcome), nice=0)
    runner.kill()
    runner.start(0, time.sleep, (20.0,), {})
    assert ended.get(timeout=60.0).cause == "its process was killed by SIGKILL"
    runner.close()
