"""What a rank says of itself: it only waits for other ranks, or something of it works."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import KeyTimeout, MemoryStore
from outlast.coordination.waits import observed_by, set_working, waits, works


@dataclass
class Page:
    waits: int = 0
    works: int = 0
    worked: float = 0.0

    @property
    def idle(self) -> bool:
        return bool(self.waits) and not self.works


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page()
    with observed_by(page):
        yield page
    assert (page.waits, page.works) == (0, 0)


def test_the_functions_thread_waits_and_an_exception_ends_that(page: Page) -> None:
    with pytest.raises(KeyError), waits(), waits():
        assert page.idle
        raise KeyError
    assert not page.waits


def test_every_wait_of_a_round_is_one(page: Page) -> None:
    class Store(MemoryStore):
        def wait_for(self, key: str, timeout: float | None) -> bytes:
            assert page.idle
            raise KeyTimeout(key)

    waited = CallLedger(Store(), "test", 0, 2).next()
    for wait in (waited.await_verdict, waited.await_conclusion):
        with pytest.raises(KeyTimeout):
            wait(1.0)
        assert not page.waits


def test_a_rank_works_until_what_works_for_it_waits_as_well(page: Page) -> None:
    steps: list[bool] = []
    work, wait = threading.Event(), threading.Event()
    end = threading.Event()

    def run() -> None:
        with works(page):
            work.set()
            wait.wait()
            with waits():
                work.set()
                end.wait()
            work.set()

    thread = threading.Thread(target=run)
    with waits():
        thread.start()
        work.wait()
        steps.append(page.idle)
        before = page.worked
        work.clear()
        wait.set()
        work.wait()
        steps.append(page.idle)
        assert page.worked >= before > 0
        end.set()
        thread.join()
    assert steps == [False, True]


def test_a_wait_of_another_thread_is_none_of_the_rank(page: Page) -> None:
    found: list[int] = []

    def wait() -> None:
        with waits():
            found.append(page.waits)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert found == [0]


def test_work_of_another_process_counts(page: Page) -> None:
    with waits():
        set_working(test_work_of_another_process_counts, True)
        assert not page.idle
        set_working(test_work_of_another_process_counts, False)
        assert page.idle


def test_what_worked_before_the_call_still_works() -> None:
    owner = object()
    set_working(owner, True)
    page = Page()
    with observed_by(page):
        assert page.works == 1
        set_working(owner, False)
        assert page.works == 0
    set_working(owner, True)  # after the call: told to nobody
    assert page.works == 0
    set_working(owner, False)
