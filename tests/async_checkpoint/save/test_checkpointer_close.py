"""A `close` that an interrupt ends, as a restart in place does, is completed by the next one."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from async_checkpoint.checkpoints import NET, state_of
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.save.after_save import SaveOutcomes
from outlast.async_checkpoint.save.folder_session import FolderSession


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
        signal.pthread_kill(main, signal.SIGUSR2)
        assert interrupted.wait(NET.total_seconds())
        while not in_finish() and not events:
            time.sleep(0.001)
        may_end.set()

    def interrupt(*_: object) -> None:
        raise Interrupt

    monkeypatch.setattr(SaveOutcomes, "await_removals", slow)
    monkeypatch.setattr(FolderSession, "close", close)
    interrupted = threading.Event()
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
        with checkpointer._session.writer.exclusive:  # else the save may have ended already
            checkpointer.save(1, state_of(1)).add_done_callback(close)
        assert told.wait(NET.total_seconds())
    assert "close() was called in a callback of a save" in str(errors[0])
