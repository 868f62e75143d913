"""The lock of an object store: of several processes at most one gets it, however late they read."""

from __future__ import annotations

import json
import logging
import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from async_checkpoint.storage.s3 import Server, keys
from outlast.async_checkpoint.storage.remote import RemoteStorage
from outlast.async_checkpoint.storage.remote_lock import OWNER, RemoteLock
from outlast.errors import CheckpointError


class LateReads:
    """A file system whose `call` is answered, and the answer arrives only when `arrive` is set."""

    def __init__(self, fs: Any, call: str) -> None:
        self._fs, self._call = fs, call
        self.answered, self.arrive = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._fs, name)

        def late(*arguments: Any, **options: Any) -> Any:
            try:
                return method(*arguments, **options)
            finally:
                self.answered.set()
                self.arrive.wait(60)

        return late if name == self._call else method


def left_by_a_dead_job(storage: RemoteStorage) -> None:
    storage.lock("a dead job")
    path = f"{storage._root}/{OWNER}"
    said = json.loads(storage._fs.cat_file(path))
    storage._fs.pipe_file(path, json.dumps({**said, "pid": 2**30}).encode())
    storage._lock._name = ""  # so that it is not released
    storage.close()


@pytest.mark.slow
@pytest.mark.parametrize("left", [False, True])
def test_what_is_read_late_wins_no_lock(s3: Server, left: bool) -> None:
    url = s3.new_url()
    if left:
        left_by_a_dead_job(RemoteStorage(url))
    with closing(RemoteStorage(url)) as first, closing(RemoteStorage(url)) as second:
        late = LateReads(first._fs, "cat_file" if left else "ls")
        first._lock._fs = late
        with ThreadPoolExecutor(1) as pool:
            lock = pool.submit(first.lock, "the late one")
            try:
                assert late.answered.wait(60)
                second.lock("the other one")
            finally:
                late.arrive.set()
            with pytest.raises(CheckpointError, match=r"taken by another job \(the other one\)"):
                lock.result(60)
        assert len(keys(url)) == 1
        with pytest.raises(CheckpointError, match="in use"):
            first.lock("the late one")


def test_a_lock_that_was_released_meanwhile(s3: Server) -> None:
    """The late one gets a free number, and then sees a holder that it has not seen before."""
    url = s3.new_url()
    left_by_a_dead_job(RemoteStorage(url))
    with closing(RemoteStorage(url)) as first, closing(RemoteStorage(url)) as second:
        late = LateReads(first._fs, "cat_file")
        first._lock._fs = late
        with ThreadPoolExecutor(1) as pool:
            lock = pool.submit(first.lock, "the late one")
            try:
                assert late.answered.wait(60)
                second.lock("another one")
                second.unlock()
                second.lock("the last one")
            finally:
                late.arrive.set()
            with pytest.raises(CheckpointError, match=r"taken by another job \(the last one\)"):
                lock.result(60)
        assert keys(url) == [OWNER]


# --------------------------------------------------------------------- many interleavings


class Stepped:
    """A file system whose calls each wait for their turn, which the seed decides."""

    def __init__(self, fs: Any, turns: Turns, who: int) -> None:
        self._fs, self._turns, self._who = fs, turns, who

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._fs, name)

        def stepped(*arguments: Any, **options: Any) -> Any:
            with self._turns.turn(self._who):
                return method(*arguments, **options)

        return stepped


class Turns:
    """Lets one of several threads make its next call, when all of them are waiting."""

    def __init__(self, seed: int, count: int) -> None:
        self._chance = random.Random(seed)
        self._changed = threading.Condition()
        self._alive, self._waiting = count, set[int]()
        self._chosen = -1

    def turn(self, who: int) -> Any:
        with self._changed:
            self._waiting.add(who)
            self._choose()
            assert self._changed.wait_for(lambda: self._chosen == who, 60)
            self._waiting.discard(who)
        return closing(self)

    def close(self) -> None:
        with self._changed:
            self._chosen = -1
            self._choose()

    def end(self) -> None:
        with self._changed:
            self._alive -= 1
            self._choose()

    def _choose(self) -> None:
        if self._chosen == -1 and self._waiting and len(self._waiting) == self._alive:
            self._chosen = self._chance.choice(sorted(self._waiting))
        self._changed.notify_all()


def race(seed: int, count: int, left: bool) -> int:
    """Jobs that lock and unlock; returns how many got the lock, which never overlap."""
    storage = RemoteStorage(f"memory://{uuid.uuid4().hex}")
    storage.prepare()
    if left:
        left_by_a_dead_job(storage)
    turns = Turns(seed, count)
    holders: list[int] = []
    got: list[int] = []

    def job(who: int) -> None:
        lock = RemoteLock(storage._fs, storage._root, storage.where)
        lock._fs = Stepped(storage._fs, turns, who)
        try:
            for _ in range(2):
                try:
                    lock.acquire(f"job {who}", careful=True)
                except CheckpointError:
                    continue
                holders.append(who)
                assert holders == [who], f"seed {seed}"
                got.append(who)
                with turns.turn(who):  # holds it while the others go on
                    pass
                assert holders == [who], f"seed {seed}"
                holders.remove(who)
                lock.release()
        finally:
            turns.end()

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(job, who) for who in range(count)]:
            done.result(60)
    return len(got)


@pytest.mark.slow
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_no_two_hold_it_in_any_interleaving(
    left: bool, count: int, request: pytest.FixtureRequest
) -> None:
    runs = 1000 if request.config.getoption("--all") else 200
    won = [race(seed, count, left) for seed in range(runs)]
    assert sum(won) > runs / 2  # and they do not keep each other out for good


# ------------------------------------------------------------- stores without conditions


class Careless:
    """A store that ignores the condition, or does not know it."""

    def __init__(self, fs: Any, error: Exception | None = None) -> None:
        self._fs, self._error = fs, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        if mode == "create" and self._error is not None:
            raise self._error
        self._fs.pipe_file(path, value)


@pytest.mark.parametrize("error", [None, OSError("NotImplemented: a header")])
def test_a_store_without_conditional_puts_is_named(
    error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    storage = RemoteStorage(f"memory://{uuid.uuid4().hex}")
    storage.prepare()
    storage._lock._fs = Careless(storage._fs, error)
    with caplog.at_level(logging.WARNING, "outlast.checkpoint"):
        storage.lock("one")
    assert "cannot create an object only if there is none" in caplog.text
    with pytest.raises(CheckpointError, match="in use"):
        storage.lock("another")
    storage.unlock()
    assert not storage._fs.exists(f"{storage._root}/{OWNER}")


def test_a_store_with_conditional_puts_is_not(s3: Server, caplog: pytest.LogCaptureFixture) -> None:
    with closing(RemoteStorage(s3.new_url())) as storage:
        storage.lock("one")
    assert caplog.records == []
