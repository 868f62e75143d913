"""A `close` that an interrupt ends, as a restart in place does, is completed by the next one."""

from __future__ import annotations

import atexit
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import psutil
import pytest

from async_checkpoint.checkpoints import NET, state_of
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.save.folder_session import FolderSession
from outlast.async_checkpoint.save.saves import SaveOutcomes
from outlast.async_checkpoint.writer.client import WriterClient


class Interrupt(BaseException):
    pass


def test_an_interrupted_close_waits_for_removals_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, begun, may_end = threading.get_ident(), threading.Event(), threading.Event()
    events: list[str] = []
    await_removals, close_session = SaveOutcomes.await_removals, FolderSession.close

    def slow(self: SaveOutcomes) -> None:
        begun.set()
        assert may_end.wait(NET.total_seconds())
        await_removals(self)
        events.append("removed")

    def close(self: FolderSession, timeout_s: float) -> None:
        events.append("closed")
        close_session(self, timeout_s)

    def in_finish() -> bool:
        frame, names = sys._current_frames()[main], set()
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back  # type: ignore[assignment]
        return "finish" in names

    def control() -> None:
        assert begun.wait(NET.total_seconds())
        while not in_finish():
            time.sleep(0.001)  # no event says that another thread has begun to wait
        # Again, if it came when that thread was about to wait: no handler runs then.
        while not raised.wait(0.05):
            signal.pthread_kill(main, signal.SIGUSR2)
        assert interrupted.wait(NET.total_seconds())
        while not in_finish() and not events:
            time.sleep(0.001)
        may_end.set()

    def interrupt(*_: object) -> None:
        if not raised.is_set():
            raised.set()
            raise Interrupt

    monkeypatch.setattr(SaveOutcomes, "await_removals", slow)
    monkeypatch.setattr(FolderSession, "close", close)
    interrupted, raised = threading.Event(), threading.Event()
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, state_of(1)).result(NET)
    before = signal.signal(signal.SIGUSR2, interrupt)
    controller = threading.Thread(target=control)
    controller.start()
    try:
        with pytest.raises(Interrupt):
            checkpointer.close()
        interrupted.set()
        checkpointer.close()
    finally:
        controller.join()
        signal.signal(signal.SIGUSR2, before)
    assert events == ["removed", "closed"]


class InterruptAtLine:
    """Raises `Interrupt` before the `number`-th line that the end of a session executes."""

    CODES = tuple(
        function.__code__
        for function in (FolderSession.close, WriterClient.close, WriterClient.end)
    )

    def __init__(self, number: int) -> None:
        self.left = number
        self.seen: set[tuple[CodeType, int]] = set()

    def __enter__(self) -> None:
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, _event: str, _: Any) -> Any:
        return self._line if frame.f_code in self.CODES else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        line = frame.f_code, frame.f_lineno
        # A `with` is traced again at its end, before `__exit__`, where no signal is handled.
        if event == "line" and line not in self.seen:
            self.seen.add(line)
            self.left -= 1
            if self.left == 0:
                raise Interrupt
        return self._line


@pytest.mark.slow
@pytest.mark.parametrize("then", ["a checkpointer follows", "the program ends"])
def test_an_interrupt_anywhere_in_the_end_of_a_session_leaves_no_writer(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", lambda f: at_exit.remove(f) if f in at_exit else None)
    before = psutil.Process().children()
    line, interrupted = 0, True
    while interrupted:
        line, interrupted = line + 1, False
        checkpointer = Checkpointer(tmp_path)
        checkpointer.save(line, state_of(line)).result(NET)
        try:
            with InterruptAtLine(line):
                checkpointer.close()
        except Interrupt:
            interrupted = True
        if then == "the program ends":
            for function in reversed(list(at_exit)):
                function()
            assert psutil.Process().children() == before, f"left by an interrupt at line {line}"
    assert line > 15  # lines of both functions
    assert psutil.Process().children() == before
    for function in at_exit:  # after the last line but one: that has no effect
        function()


def test_a_close_in_a_callback_is_refused(tmp_path: Path) -> None:
    errors: list[Exception] = []
    told = threading.Event()

    def close(_: object) -> None:
        try:
            checkpointer.close(NET)
        except RuntimeError as e:
            errors.append(e)
        told.set()

    with Checkpointer(tmp_path) as checkpointer:
        with checkpointer.session.writer.exclusive:  # else the save may have ended already
            checkpointer.save(1, state_of(1)).add_done_callback(close)
        assert told.wait(NET.total_seconds())
    assert "close() was called in a callback of a save" in str(errors[0])


@pytest.mark.slow
def test_a_close_ends_the_writers_that_were_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose reader still waits for it to end by itself, which it would not."""
    monkeypatch.setattr("outlast.async_checkpoint.writer.client._EXIT_S", 3.0)
    with Checkpointer(tmp_path / "c") as checkpointer:
        checkpointer.save(1, state_of(1)).wait(NET)
        client = checkpointer.session.writer
        process = client._process
        assert process is not None
        replaced = psutil.Process(process.pid)
        process.channel._shut_down()  # as an interrupt in the middle of a message does
        while client.pid == replaced.pid:
            time.sleep(0.001)  # no event says that the reader has noticed it
        checkpointer.save(2, state_of(2)).wait(NET)
        assert client.pid != replaced.pid
    assert not replaced.is_running()
