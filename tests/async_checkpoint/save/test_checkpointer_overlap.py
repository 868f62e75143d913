"""C2: the state at the moment of `save` is saved, whatever training does next."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from async_checkpoint.checkpoints import (
    NET,
    copy_of,
    left_over,
    restored,
    same,
    state_of,
    valid_steps,
)
from async_checkpoint.staged_writer import Plan
from inprocess.mutations import mutate
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.snapshot.overlap import Writes
from outlast.async_checkpoint.snapshot.snapshot import Snapshot
from outlast.async_checkpoint.writer.main import Writer
from outlast.errors import CheckpointError, TornSnapshot


class HeldCopy:
    """Holds back the overlapped copy until it is released or waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        real, await_copy = Snapshot._fill, Snapshot._await_copy

        def fill(copy: Any, *arguments: Any) -> int:
            self.begun.set()
            assert self.go.wait(60)
            return real(copy, *arguments)

        def awaited(copy: Any) -> None:
            self.go.set()
            await_copy(copy)

        monkeypatch.setattr(Snapshot, "_fill", fill)
        monkeypatch.setattr(Snapshot, "_await_copy", awaited)

    def again(self) -> None:
        self.begun.clear()
        self.go.clear()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldCopy]:
    held = HeldCopy(monkeypatch)
    yield held
    held.go.set()


def hooks() -> int:
    return len(_global_optimizer_pre_hooks)


class Training:
    """A model whose statistics change in the forward pass, with optimizers for its parts."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128), torch.nn.Linear(128, 8)
        )
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
        make: dict[str, Callable[[], list[torch.optim.Optimizer]]] = {
            "adam": lambda: [torch.optim.Adam(self.net.parameters())],
            "fused adam": lambda: [torch.optim.AdamW(self.net.parameters(), fused=True)],
            "momentum": lambda: [torch.optim.SGD(self.net.parameters(), 0.1, momentum=0.9)],
            "several": lambda: [
                torch.optim.Adam(self.net[0].parameters(), foreach=True),
                torch.optim.SGD(self.net[1].parameters(), 0.1),
                torch.optim.RMSprop(self.net[2].parameters()),
            ],
        }
        self.optimizers = make[kind]()
        self.count = 0

    def backward(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.net(torch.randn(16, 64)).square().sum().backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.average.update_parameters(self.net)
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {
            "net": self.net.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "count": self.count,
        }


def check_state_at_the_save(path: Path, kind: str, held: HeldCopy, saves: int = 4) -> None:
    training = Training(kind)
    expected = {}
    with Checkpointer(path, overlap=training.optimizers, max_in_flight=2) as checkpointer:
        for step in range(saves):
            training.backward()
            training.step()
            held.again()
            expected[step] = copy_of(training.state())
            handle = checkpointer.save(step, training.state())
            assert held.begun.wait(60)
            assert not handle.done()
            training.backward()  # the statistics change, the parameters do not
            training.step()  # waits for the copy
        checkpointer.wait(NET)
        assert hooks() == 0
        for step, state in expected.items():
            found = copy_of(training.state())
            assert checkpointer.restore(found, step=step) == step
            assert same(found, state)


def test_a_save_does_not_wait_until_its_copy_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new thread may get a processor much later: only the optimizer's step waits for it."""
    training = Training("adam")
    training.backward()
    training.step()
    expected = copy_of(training.state())
    later: list[Callable[[], object]] = []
    start, await_copy = _thread.start_new_thread, Snapshot._await_copy

    def put_off(work: Callable[[], object], arguments: tuple[()]) -> int:
        later.append(lambda: start(work, arguments))
        return 1

    def awaited(copy: Any) -> None:
        later.pop()()
        await_copy(copy)

    with Checkpointer(tmp_path, overlap=training.optimizers) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(_thread, "start_new_thread", put_off)
            patch.setattr(Snapshot, "_await_copy", awaited)
            handle = checkpointer.save(1, training.state())
            assert len(later) == 1
            training.backward()
            training.step()
        assert later == []
        handle.wait(NET)
        found = copy_of(training.state())
        assert checkpointer.restore(found) == 1
        assert same(found, expected)


@pytest.mark.parametrize("kind", ["adam", "fused adam", "momentum", "several"])
def test_the_state_at_the_save_is_saved(tmp_path: Path, held: HeldCopy, kind: str) -> None:
    check_state_at_the_save(tmp_path, kind, held)


def test_the_check_finds_a_step_that_does_not_wait(
    tmp_path: Path, held: HeldCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, Snapshot._before_step, "self.seal()", "pass")
    with pytest.raises(TornSnapshot, match="' and 2 more were written to before the"):
        check_state_at_the_save(tmp_path, "adam", held, saves=1)


def check_torn(path: Path, held: HeldCopy, *, sealed_by: str) -> None:
    """A parameter is written to between `save` and the optimizer's step, while it is copied."""
    training = Training("adam")
    training.backward()
    training.step()
    with Checkpointer(path, overlap=training.optimizers) as checkpointer:
        held.go.set()
        checkpointer.save(1, {"fine": torch.ones(3)}).wait(NET)
        held.again()
        handle = checkpointer.save(2, training.state())
        assert held.begun.wait(60)
        with torch.no_grad():
            training.net[0].weight.add_(1.0)
        if sealed_by == "step":
            training.step()
        error = None
        try:
            handle.wait(NET)
        except CheckpointError as e:
            error = str(e)
        assert error is not None
        assert "'net.0.weight' was written to before the optimizer's step" in error
        assert hooks() == 0
        held.go.set()
    assert 2 not in valid_steps(path)


@pytest.mark.parametrize("sealed_by", ["step", "wait"])
def test_a_torn_snapshot_is_never_saved(tmp_path: Path, held: HeldCopy, sealed_by: str) -> None:
    check_torn(tmp_path, held, sealed_by=sealed_by)
    assert valid_steps(tmp_path) == [1]


def test_the_check_finds_that_writes_are_not_detected(
    tmp_path: Path, held: HeldCopy, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, Writes.found, "source._version != version", "False")
    with pytest.raises(AssertionError):
        check_torn(tmp_path, held, sealed_by="step")


def test_after_a_torn_snapshot_all_is_copied_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A later save replaces the one that has failed: its error is a warning, and is not raised."""
    training = Training("adam")
    with Checkpointer(tmp_path, overlap=training.optimizers) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, training.state())
            expected = copy_of(training.state())
            with torch.no_grad():
                training.net[0].weight.add_(1.0)
        checkpointer.wait(NET)
        found = copy_of(training.state())
        assert checkpointer.restore(found) == 2
        assert same(found, expected)
    assert valid_steps(tmp_path) == [2]
    (warning,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert warning.getMessage().endswith("copies everything at once, as with overlap=False")


LARGE = 6_000_000  # elements: more than is written, and reported, at once


class HalfCopied:
    """Holds back the overlapped copy when it is half done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.reached = threading.Event()
        real = Snapshot._fill

        def fill(copy: Any, chunks: Any, number: int) -> int:
            if number >= len(chunks) / 2:
                self.reached.set()
                assert self.go.wait(60)
            return real(copy, chunks, number)

        monkeypatch.setattr(Snapshot, "_fill", fill)


def two_tensors() -> tuple[dict[str, torch.Tensor], torch.optim.Optimizer]:
    parameters = [torch.nn.Parameter(torch.randn(LARGE)) for _ in range(2)]
    state = {name: p.detach() for name, p in zip("ab", parameters, strict=True)}
    for parameter in parameters:
        parameter.grad = torch.ones(LARGE)
    return state, torch.optim.SGD(parameters, 0.1)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    return Plan(tmp_path / "plan").use(monkeypatch)


def test_copied_bytes_are_written_during_the_copy(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = HalfCopied(monkeypatch)
    state, optimizer = two_tensors()
    expected = copy_of(state)
    plan.set({"op": "write_at", "do": "wait"})
    with Checkpointer(tmp_path / "c", overlap=optimizer) as checkpointer:
        handle = checkpointer.save(1, state)
        plan.gate().arrived()  # with one half not yet copied
        plan.set()
        plan.gate().open()
        half.go.set()
        optimizer.step()
        handle.wait(NET)
    check_on_disk(tmp_path / "c", expected)


def check_on_disk(path: Path, expected: dict[str, torch.Tensor]) -> None:
    with Checkpointer(path) as checkpointer:
        found = {name: torch.zeros(LARGE) for name in expected}
        assert checkpointer.restore(found) == 1
        assert same(found, expected)


def test_the_check_finds_a_writer_that_does_not_wait_for_the_copy(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = "outlast.async_checkpoint.writer.write_files"
    plan.mutate((writing, "write_files", "filled(part.begin + at + size)", "True"))
    half = HalfCopied(monkeypatch)
    state, optimizer = two_tensors()
    expected = copy_of(state)
    plan.set({"op": "finish", "do": "wait"})
    with Checkpointer(tmp_path / "c", overlap=optimizer) as checkpointer:
        handle = checkpointer.save(1, state)
        plan.gate().arrived()  # everything is written, but only half was copied
        plan.set()
        plan.gate().open()
        half.go.set()
        optimizer.step()
        handle.wait(NET)
    with pytest.raises(CheckpointError, match="damaged"):
        check_on_disk(tmp_path / "c", expected)


@pytest.mark.parametrize("how", ["torn", "aborted"])
def test_a_save_that_is_dropped_while_it_is_written_leaves_nothing(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    half = HalfCopied(monkeypatch)
    state, optimizer = two_tensors()
    plan.set({"op": "write_at", "do": "wait"})
    checkpointer = Checkpointer(tmp_path / "c", overlap=optimizer)
    handle = checkpointer.save(1, state)
    plan.gate().arrived()
    plan.set()
    plan.gate().open()
    if how == "torn":
        state["b"].add_(1.0)
        half.go.set()
        optimizer.step()
    else:
        await_copy = Snapshot._await_copy

        def awaited(copy: Any) -> None:
            half.go.set()  # the copy ends when it is waited for
            await_copy(copy)

        monkeypatch.setattr(Snapshot, "_await_copy", awaited)
        checkpointer.abort()
    with pytest.raises(CheckpointError, match="written to" if how == "torn" else "dropped"):
        handle.wait(NET)
    checkpointer.close()
    assert hooks() == 0
    with Checkpointer(tmp_path / "c"):
        pass
    assert valid_steps(tmp_path / "c") == []
    assert left_over(tmp_path / "c") == []


def test_a_writer_that_is_lost_during_the_copy_fails_the_save(
    tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = HalfCopied(monkeypatch)
    state, optimizer = two_tensors()
    plan.set({"op": "write_at", "do": "wait"})
    with Checkpointer(tmp_path / "c", overlap=optimizer) as checkpointer:
        handle = checkpointer.save(1, state)
        os.kill(plan.gate().arrived(), signal.SIGKILL)
        plan.set()
        half.go.set()
        optimizer.step()
        with pytest.raises(CheckpointError, match="killed by SIGKILL"):
            handle.wait(NET)
        expected = copy_of(state)
        checkpointer.save(1, state).wait(NET)
    check_on_disk(tmp_path / "c", expected)


def test_a_seal_that_comes_while_the_writer_is_replaced_reaches_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, optimizer = two_tensors()
    with Checkpointer(tmp_path / "c", overlap=optimizer) as checkpointer:
        client = checkpointer.session.writer
        checkpointer.save(1, state).wait(NET)
        optimizer.step()
        ask = client.request
        replaying, sealed = threading.Event(), threading.Event()

        def killed_before(method: Any, **arguments: Any) -> Any:
            if method is Writer.begin_save:
                monkeypatch.setattr(client, "request", ask)
                assert client._process is not None
                client._process.kill()
                client._process.wait()
            return ask(method, **arguments)

        class Ends(dict[int, Any]):
            """Messages repeated to the new writer: the seal comes after they are read."""

            def values(self) -> Any:
                found = list(super().values())
                replaying.set()
                sealed.wait(0.5)  # times out if the seal has to wait for this
                return found

        monkeypatch.setattr(client, "request", killed_before)
        client._ends = Ends(client._ends)
        handle = checkpointer.save(2, state)
        expected = copy_of(state)
        assert replaying.wait(60)
        optimizer.step()
        sealed.set()
        handle.wait(NET)
        found = {name: torch.zeros(LARGE) for name in expected}
        assert checkpointer.restore(found, step=2) == 2
        assert same(found, expected)


@pytest.mark.parametrize("then", ["save", "close"])
def test_an_interrupted_seal_is_completed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    state, optimizer = two_tensors()
    with Checkpointer(tmp_path, overlap=optimizer) as checkpointer:
        handle = checkpointer.save(1, state)
        expected = copy_of(state)
        client = checkpointer.session.writer
        tell = client.tell

        def interrupted(method: Any, **arguments: Any) -> None:
            if method is Writer.sealed:
                monkeypatch.setattr(client, "tell", tell)
                raise KeyboardInterrupt
            tell(method, **arguments)

        monkeypatch.setattr(client, "tell", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        if then == "save":
            checkpointer.save(2, state).wait(NET)
            handle.wait(NET)
    with Checkpointer(tmp_path) as checkpointer:
        found = {name: torch.zeros(LARGE) for name in expected}
        assert checkpointer.restore(found, step=1) == 1
        assert same(found, expected)


def test_an_interrupted_wait_for_the_copy_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interrupted `Thread.join`, the thread counts as ended."""
    half = HalfCopied(monkeypatch)
    state, optimizer = two_tensors()
    checkpointer = Checkpointer(tmp_path, overlap=optimizer)
    checkpointer.save(1, state)
    (save,) = checkpointer.saves.pending
    assert save.taken is not None
    with monkeypatch.context() as patch:
        await_copy = Snapshot._await_copy

        def interrupted(copy: Any) -> None:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            await_copy(copy)

        patch.setattr(Snapshot, "_await_copy", interrupted)
        # A shell that runs the tests in the background makes them ignore SIGINT.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            assert half.reached.wait(60)  # else the call-off below would come before the copy
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        finally:
            signal.signal(signal.SIGINT, before)
    over = threading.Event()

    def call_off() -> None:
        assert save.taken is not None
        save.taken.call_off()
        over.set()

    calling = threading.Thread(target=call_off)
    calling.start()
    assert not over.wait(0.2)
    half.go.set()
    assert over.wait(60)
    calling.join()
    assert save.taken._copied.is_set()
    checkpointer.abort()
    with Checkpointer(tmp_path):
        pass


def test_the_step_of_another_optimizer_does_not_wait(tmp_path: Path, held: HeldCopy) -> None:
    training, other = Training("adam"), Training("momentum")
    for each in (training, other):
        each.backward()
    with Checkpointer(tmp_path, overlap=training.optimizers) as checkpointer:
        handle = checkpointer.save(1, training.state())
        assert held.begun.wait(60)
        other.step()
        assert not held.go.is_set()
        training.step()
        assert held.go.is_set()
        handle.wait(NET)
        assert hooks() == 0


def test_an_aborted_snapshot_leaves_no_hook(tmp_path: Path, held: HeldCopy) -> None:
    training = Training("adam")
    checkpointer = Checkpointer(tmp_path, overlap=training.optimizers)
    handle = checkpointer.save(1, training.state())
    assert held.begun.wait(60)
    checkpointer.abort()
    assert handle._await_end(60)
    assert hooks() == 0
    with Checkpointer(tmp_path):
        assert valid_steps(tmp_path) == []


def test_an_eager_save_takes_the_state_at_the_save(tmp_path: Path) -> None:
    state = state_of(1)
    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(1, state)
        state["model"]["weight"].zero_()
        state["steps"] = 9
        handle.wait(NET)
    assert restored(tmp_path) == 1


@pytest.mark.parametrize("few", [True, False])
def test_what_is_copied_at_once_is_not_held_until_the_step(
    tmp_path: Path, held: HeldCopy, few: bool
) -> None:
    """Such as a copy that is made for the save only: the backward pass needs the memory."""
    training = Training("adam")
    made = [torch.ones(size) for size in (3, 100_000) for _ in range(1 if few else 40)]
    gone = [weakref.ref(each) for each in made]
    with Checkpointer(tmp_path, overlap=training.optimizers) as checkpointer:
        handle = checkpointer.save(1, {"training": training.state(), **dict(enumerate(made))})
        del made
        assert not any(each() is not None for each in gone)
        training.backward()
        training.step()
        handle.wait(NET)
