"""A disk or a writer process that does not respond: every wait of a save ends with an error."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from async_checkpoint.checkpoints import NET, state_of, valid_steps
from async_checkpoint.staged_writer import Plan
from outlast import Job
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.save.save import Save
from outlast.errors import CheckpointTimeout, RestartError
from procs import Job as Processes

SHORT_S = 0.3
FILE = "__0_0.distcp"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    return Plan(tmp_path / "plan").use(monkeypatch)


def limit(checkpointer: Checkpointer, timeout_s: float) -> None:
    """Sets the timeout once a writer is running: under load a writer takes seconds to start."""
    checkpointer.session.writer.timeout_s = timeout_s


def check_error(error: BaseException, path: Path) -> None:
    assert isinstance(error, TimeoutError)
    assert not isinstance(error, RestartError)
    assert re.search(rf"{path} within 0.3 s .*respond|0.3 s for .* to {path} .*respond", str(error))


@pytest.mark.slow
@pytest.mark.parametrize(
    "op", ["publish", *(pytest.param(op, marks=pytest.mark.slow) for op in ("write_at", "finish"))]
)
def test_a_disk_that_hangs(tmp_path: Path, plan: Plan, op: str) -> None:
    path = tmp_path / "c"
    with Checkpointer(path) as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        lost = checkpointer.session.writer.pid
        plan.set({"op": op, "name": "" if op == "publish" else FILE, "do": "wait"})
        gate = plan.gate()
        # What comes before the operation that hangs has to be done within it.
        timeout_s = SHORT_S if op == "write_at" else 3.0
        limit(checkpointer, timeout_s)
        handle = checkpointer.save(2, state_of(2))
        gate.arrived()
        error = handle.exception(NET)
        assert error is not None
        if op != "publish":  # there the error is the one that rank 0 reports to all ranks
            assert isinstance(error, CheckpointTimeout)
        within = f"within {timeout_s:g} s (the disk may not respond), and was killed"
        assert f"in {path} {within}" in str(error)
        unknown = "it is not known whether " if op == "publish" else ""
        assert str(error).startswith(f"{unknown}the save of step 2 ")
        plan.set()
        limit(checkpointer, NET.total_seconds())
        checkpointer.save(3, state_of(3)).wait(NET)
        assert lost is not None
        assert not psutil.pid_exists(lost)
    assert valid_steps(path) == [1, 3]


def test_a_save_does_not_wait_longer_for_a_buffer(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c"
    with Checkpointer(path) as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        plan.set({"op": "write_at", "name": FILE, "do": "wait"})
        gate = plan.gate()
        handle = checkpointer.save(2, state_of(2))  # its write may take a minute
        gate.arrived()
        # Not the limit of the writer, which would be killed, and with it the end of the gate.
        with monkeypatch.context() as patch, pytest.raises(CheckpointTimeout) as error:
            patch.setattr(Save, "_timeout_s", SHORT_S)
            checkpointer.save(3, state_of(3))
        check_error(error.value, path)
        assert "save of step 3 could not begin: rank 0 waited 0.3 s" in str(error.value)
        plan.set()
        gate.open()
        handle.result(NET)
        checkpointer.save(4, state_of(4)).result(NET)
    assert valid_steps(path) == [1, 2, 4]


def test_a_step_of_a_job_does_not_wait_longer(tmp_path: Path, plan: Plan) -> None:
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters())
    path = tmp_path / "c"
    with Job(path, model=net, optimizer=optimizer, every=1, overlap=False, signals=()) as job:
        job.restore()
        plan.set({"op": "write_at", "name": FILE, "do": "wait"})
        gate = plan.gate()
        limit(job.checkpointer, SHORT_S)
        job.step()
        gate.arrived()
        with pytest.raises(CheckpointTimeout) as error:
            for _ in range(3):
                job.step()
        check_error(error.value, path)
        plan.set()
        limit(job.checkpointer, NET.total_seconds())
        for save in job.checkpointer.saves.pending:
            save.handle.exception(NET)
        with contextlib.suppress(CheckpointTimeout):  # of an earlier save: this one has begun
            job.save()
        for save in job.checkpointer.saves.pending:
            save.handle.result(NET)
    assert valid_steps(path)[-1] == job.steps


def test_a_stopped_writer(tmp_path: Path) -> None:
    state = {"x": torch.ones(10)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).wait(NET)
        writer = checkpointer.session.writer.pid
        assert writer is not None
        limit(checkpointer, SHORT_S)
        os.kill(writer, signal.SIGSTOP)
        error = checkpointer.save(2, state).exception(NET)
        assert isinstance(error, CheckpointTimeout)
        assert "the writer process" in str(error)
        limit(checkpointer, NET.total_seconds())
        checkpointer.save(3, state).wait(NET)
        assert not psutil.pid_exists(writer)
    assert valid_steps(tmp_path) == [1, 3]


def test_a_stopped_writer_that_does_not_read_a_message_is_replaced(tmp_path: Path) -> None:
    """A large value does not fit into the socket: the main thread waits, not that of the saves."""
    state = {"x": torch.ones(10), "value": "v" * 1_000_000}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state).wait(NET)
        process = checkpointer.session.writer._process
        assert process is not None
        process.channel.limit(SHORT_S)
        os.kill(process.pid, signal.SIGSTOP)

        def kill() -> None:
            del process.kill  # type: ignore[method-assign] - a kill takes a moment

        process.kill = kill  # type: ignore[method-assign]
        assert checkpointer.save(2, state).result(NET) == 2
        assert checkpointer.session.writer.pid != process.pid
    assert valid_steps(tmp_path) == [1, 2]


def test_a_writer_killed_by_a_late_message_is_reported_as_late(tmp_path: Path, plan: Plan) -> None:
    with Checkpointer(tmp_path / "c") as checkpointer:
        writing = checkpointer.session.writer
        checkpointer.save(1, state_of(1)).wait(NET)
        plan.set({"op": "write_at", "name": FILE, "do": "wait"})
        gate = plan.gate()
        handle = checkpointer.save(2, state_of(2))
        gate.arrived()
        process = writing._process
        assert process is not None
        writing.kill_late(process)  # by a message of another thread
        error = handle.exception(NET)
        assert isinstance(error, CheckpointTimeout)
        assert "could not write the files of this rank" in str(error)
        plan.set()
        checkpointer.save(3, state_of(3)).wait(NET)


def test_the_disk_of_one_rank_hangs(ranks: Callable[..., Processes], tmp_path: Path) -> None:
    plan = Plan(tmp_path / "plan")
    with ranks("uneven", "one_disk_hangs", str(tmp_path / "c"), str(plan.folder)) as job:
        job.start_all()
        assert job.wait_all(60) == {0: 0, 1: 0}, (job.errors(0) + job.errors(1))[-4000:]
        for rank in range(2):
            (message,) = [x["message"] for x in job.lines(rank) if x["event"] == "raised"]
            assert "the save of step 2 failed on rank 1 on" in message
            assert f"could not write the files of this rank in {tmp_path}/c within 0.3 s" in message
    assert valid_steps(tmp_path / "c") == [1, 3]
