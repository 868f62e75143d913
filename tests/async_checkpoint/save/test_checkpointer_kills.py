"""C4: a save killed at any moment leaves all earlier checkpoints intact, and no partial one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_checkpoint.checkpoints import (
    NET,
    blank,
    left_over,
    restored,
    same,
    save_steps,
    state_of,
    valid_steps,
)
from async_checkpoint.staged_writer import Plan
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.save.save import Save
from outlast.async_checkpoint.storage.local import LocalStorage
from outlast.async_checkpoint.writer.client import WriterClient
from outlast.async_checkpoint.writer.main import Writer
from outlast.errors import CheckpointError
from procs import Job

Ranks = Callable[..., Job]
KILLS = 50
LARGE = 1_000_000  # elements: a save takes long enough to be hit


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    return Plan(tmp_path / "plan").use(monkeypatch)


def check_killed_at_every_operation(path: Path, plan: Plan, operations: range) -> None:
    """Kills the writer before its n-th operation on the storage, for each n."""
    save_steps(path, 1)
    with Checkpointer(path) as checkpointer:
        for number in operations:
            plan.set({"number": number, "do": "kill"})
            with pytest.raises(CheckpointError, match=r"process .* was killed by SIGKILL"):
                checkpointer.save(2, state_of(2)).wait(NET)
            published = any(
                note["op"] == "publish" and "step-00000002" in note["folder"]
                for note in plan.notes()
            )
            assert valid_steps(path) == ([1, 2] if published else [1])
        plan.set()
        state = blank()
        assert checkpointer.restore(state, step=1) == 1
        assert same(state, state_of(1))
        checkpointer.save(3, state_of(3)).wait(NET)


def operations_of_a_save(path: Path, plan: Plan) -> range:
    with Checkpointer(path) as checkpointer:
        before = len(plan.notes())
        checkpointer.save(1, state_of(1)).wait(NET)
    notes = plan.notes()[before:]
    plan.folder.joinpath("notes").unlink()
    assert notes[-2]["op"] == "publish"
    return range(1, notes[-2]["number"] + 1)


@pytest.mark.slow
def test_killed_at_every_operation(tmp_path: Path, plan: Plan) -> None:
    operations = operations_of_a_save(tmp_path / "first", plan)
    assert len(operations) >= 10
    check_killed_at_every_operation(tmp_path / "c", plan, operations)
    assert valid_steps(tmp_path / "c") == [1, 3]
    assert restored(tmp_path / "c") == 3
    assert left_over(tmp_path / "c") == []  # the next job has cleaned up


def test_the_check_finds_a_save_that_is_written_in_place(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_place(self: LocalStorage, step: int, save_id: str) -> tuple[str, str]:
        return f"step-{step:08d}", f"step-{step:08d}"

    save_steps(tmp_path / "c", 1)
    monkeypatch.setattr(LocalStorage, "names_for", in_place)
    monkeypatch.setattr(Save, "_remove_files", lambda _: None)  # as if all had been killed
    plan.set({"op": "finish", "do": "kill"})
    with Checkpointer(tmp_path / "c") as checkpointer:
        handle = checkpointer.save(2, state_of(2))
        with pytest.raises(CheckpointError, match="killed"):
            handle.wait(NET)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        valid_steps(tmp_path / "c")


def test_killed_after_the_commit_it_is_whole(tmp_path: Path, plan: Plan) -> None:
    plan.set({"op": "publish", "when": "after", "do": "kill"})
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(2, state_of(2)).wait(NET)  # the next writer has found it
        plan.set()
    assert valid_steps(tmp_path / "c") == [2]
    assert restored(tmp_path / "c") == 2


@pytest.mark.slow
def test_the_writer_is_killed_at_random_moments(tmp_path: Path) -> None:
    chance = random.Random(1)
    state = state_of(0, LARGE)
    outcomes = {True: 0, False: 0}
    with Checkpointer(tmp_path) as checkpointer:
        durations = []
        for step in range(4):
            began = time.monotonic()
            checkpointer.save(step, state).wait(NET)
            durations.append(time.monotonic() - began)
        good, seen = 3, set(range(4))
        for step in range(4, 4 + KILLS):
            pid = running_writer(checkpointer)
            usual = statistics.median(durations[-5:])  # lately: the machine may do something else
            killer = threading.Timer(chance.uniform(0, 1.3 * usual), os.kill, (pid, signal.SIGKILL))
            began = time.monotonic()
            handle = checkpointer.save(step, state)
            killer.start()
            assert handle._await_end(60)
            took = time.monotonic() - began
            killer.join()
            error = str(handle.exception(NET) or "")
            assert not error or "killed by SIGKILL" in error or "was not committed" in error
            outcomes[not error] += 1
            if not error:
                durations.append(took)
            found = valid_steps(tmp_path)
            assert good in found or step in found
            assert set(found) <= seen | {step}
            seen.update(found)
            good = step if step in found else good
    assert outcomes[False] > KILLS // 5, outcomes
    assert restored_large(tmp_path, state) == good
    assert left_over(tmp_path) == []


def await_sent(client: WriterClient) -> None:
    while not client._pending:
        time.sleep(0.001)


def test_a_writer_killed_as_a_save_begins_is_replaced(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        client = checkpointer.session.writer
        pid = client.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # it looks alive, and does not answer
        handle = checkpointer.save(2, state_of(2))
        await_sent(client)
        os.kill(pid, signal.SIGKILL)
        handle.wait(NET)
        assert client.pid != pid
        assert valid_steps(tmp_path) == [1, 2]
        state = blank()
        assert checkpointer.restore(state) == 2
        assert same(state, state_of(2))


@pytest.mark.parametrize("why", ["busy", "cut short"])
def test_a_writer_that_the_library_kills_is_not_said_to_be_killed_by_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        client = checkpointer.session.writer
        process = client._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        handle = checkpointer.save(2, state_of(2))
        await_sent(client)
        if why == "busy":
            client.await_idle(0.0)  # as a restart in place does
        else:
            process.channel._shut_down()  # a restart in place has interrupted another message
        handle.wait(NET)
    [said] = [r.getMessage() for r in caplog.records if "before a save began" in r.getMessage()]
    assert f"writer process {process.pid}" in said
    assert "SIGKILL" not in said
    assert ("took its buffers back" if why == "busy" else "end of its connection") in said


def test_a_second_writer_killed_as_a_save_begins_fails_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        client = checkpointer.session.writer
        running, killed = client._running, []

        def and_stopped(method: str = "") -> Any:
            process = running(method)
            if len(killed) < 2:
                os.kill(process.pid, signal.SIGSTOP)
            return process

        monkeypatch.setattr(client, "_running", and_stopped)
        handle = checkpointer.save(2, state_of(2))
        for _ in range(2):
            await_sent(client)
            (pid,) = {each.process.pid for each in client._pending.values() if each.process}
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
            while client.pid == pid:
                time.sleep(0.001)
        with pytest.raises(CheckpointError, match=rf"writer process {pid} was killed by SIGKILL"):
            handle.wait(NET)
        checkpointer.save(3, state_of(3)).wait(NET)
    assert valid_steps(tmp_path) == [1, 3]


def running_writer(checkpointer: Checkpointer) -> int:
    """The writer's pid; starts a writer if the last kill came after the save."""
    writer = checkpointer.session.writer
    while True:
        with contextlib.suppress(CheckpointError):
            writer.request(Writer.begin_save)
            assert writer.pid is not None
            return writer.pid


def restored_large(path: Path, expected: dict[str, object]) -> int | None:
    with Checkpointer(path) as checkpointer:
        state = {**blank(), "model": {**blank()["model"]}}
        state["model"]["weight"] = state["model"]["weight"].new_zeros(LARGE)
        step = checkpointer.restore(state)
        assert same(state, expected)
        return step


@pytest.mark.slow
@pytest.mark.parametrize("nprocs", [1, 2])
def test_the_main_process_is_killed_at_random_moments(
    ranks: Ranks, tmp_path: Path, nprocs: int
) -> None:
    chance = random.Random(nprocs)
    committed = -1
    for _ in range(5 if nprocs == 1 else 2):
        with ranks("lives", "trains", str(tmp_path / "c"), nprocs=nprocs) as job:
            job.start_all()
            begun = job.wait_for_line(0, lambda line: line["event"] == "restored")
            assert begun["left"] == []
            assert begun["step"] is None if committed < 0 else begun["step"] >= committed
            job.wait_for_line(0, lambda line: line["event"] == "committed")
            time.sleep(chance.uniform(0, 0.1))
            for rank in chance.sample(range(nprocs), nprocs):
                job.send(rank, signal.SIGKILL)
            job.wait_all()
            done = [line["step"] for line in job.lines(0) if line["event"] == "committed"]
            committed = max([committed, *done])
        found = valid_steps(tmp_path / "c")
        assert not found or found[-1] >= committed
    assert committed > 0
