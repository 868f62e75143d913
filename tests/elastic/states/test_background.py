"""Background saves: the states are saved as they were at the call."""

from __future__ import annotations

import contextlib
import datetime
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from elastic.text_state import Text
from outlast.elastic import load_state, save_all_states
from outlast.elastic.states import storage
from outlast.errors import CheckpointError


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A gate for which saves wait before they write."""
    may_write = threading.Event()
    begin = storage.begin

    def gated(path: str, contents: Mapping[str, storage.MemoryFile]) -> Callable[[], str]:
        finish = begin(path, contents)

        def wait() -> str:
            assert may_write.wait(60)
            return finish()

        return wait

    monkeypatch.setattr(storage, "begin", gated)
    return may_write


def test_it_saves_what_was_there(folder: Path, may_write: threading.Event) -> None:
    state = Text("a", "then")
    handle = save_all_states(asynchronous=True)
    assert handle is not None
    assert state.calls == ["sync", "save"]
    assert not handle.done()
    assert handle.directory is None
    with pytest.raises(TimeoutError, match="not committed after"):
        handle.wait(datetime.timedelta(milliseconds=1))
    state.text = "later"
    may_write.set()
    handle.wait()
    assert handle.done()
    assert handle.directory == handle.result() == str(folder / "states" / "step-00000001")
    assert handle.exception() is None
    assert load_state(state)
    assert state.text == "then"


def test_a_second_one_waits_for_the_first(folder: Path, may_write: threading.Event) -> None:
    state = Text("a", "1")
    first = save_all_states(asynchronous=True)
    assert first is not None
    opener = threading.Timer(0.05, may_write.set)
    opener.start()
    state.text = "2"
    second = save_all_states(asynchronous=True)  # at most one copy is in memory
    assert first.done()
    opener.join()
    assert second is not None
    second.wait()
    assert load_state(state)
    assert state.text == "2"
    assert second.directory == str(folder / "states" / "step-00000002")


def test_a_load_waits_for_it(folder: Path, may_write: threading.Event) -> None:
    state = Text("a", "1")
    handle = save_all_states(asynchronous=True)
    assert handle is not None
    opener = threading.Timer(0.05, may_write.set)
    opener.start()
    state.text = ""
    assert load_state(state)
    assert handle.done()
    assert state.text == "1"
    opener.join()


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """The writer of a first save can write no more."""
    save_all_states()
    (writer,) = (
        child
        for child in psutil.Process().children()
        if "outlast.async_checkpoint.writer.main" in child.cmdline()
    )
    before = resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    yield
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, before)


def test_a_failure_is_the_handles(folder: Path) -> None:
    state = Text("a", "1")
    with full_disk():
        handle = save_all_states(asynchronous=True)
        assert handle is not None
        with pytest.raises(CheckpointError, match=r"the save into .* failed: .*File too large"):
            handle.wait()
        assert isinstance(handle.exception(), CheckpointError)
        assert "failed" in repr(handle)
    assert save_all_states() is not None
    assert state.calls.count("save") == 3


def test_a_failure_that_nobody_saw_is_raised_by_the_next_save(folder: Path) -> None:
    state = Text("a", "1")
    with full_disk():
        save_all_states(asynchronous=True)
        assert load_state(state)  # of the first save
        with pytest.raises(CheckpointError, match="File too large"):
            save_all_states()
    assert save_all_states() is not None
    assert state.calls.count("save") == 3


@pytest.mark.slow
def test_a_program_that_ends_waits_for_it(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from elastic.text_state import Text\n"
        "from outlast.elastic import save_all_states\n"
        "from outlast.elastic.states import storage\n"
        "begin = storage.begin\n"
        "def slow(path, contents):\n"
        "    finish = begin(path, contents)\n"
        "    return lambda: (time.sleep(0.2), finish())[1]\n"
        "storage.begin = slow\n"
        "state = Text('a', 'x' * 10_000_000)\n"
        "save_all_states(asynchronous=True)\n"
    )
    tests = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": tests, "OUTLAST_CHECKPOINT_PATH": str(tmp_path / "c")}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
    (saved,) = (tmp_path / "c" / "states" / "step-00000001").glob("*.distcp")
    assert saved.stat().st_size >= 10_000_000
