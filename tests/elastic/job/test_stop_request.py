"""The request to stop in one process: signals, and the order of the store and the agreement."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outlast.elastic.stop_signals import StopRequest
from outlast.errors import StoreError


class Records:
    """Stands for an agreement, and for the running call: records in which order it is asked."""

    rank = 1

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.lost = False
        self.changed = threading.Condition()

    def request(self, why: str) -> None:
        self._add(f"agreement: {why}")

    def close(self) -> None:
        self._add("closed")

    def request_stop(self, reason: str, exit_code: int) -> None:
        self._add(f"store: {reason.partition(': ')[2]} ({exit_code})")
        if self.lost:
            raise StoreError("the store is gone")

    def until(self, number: int) -> list[str]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= number, 60.0)
            return list(self.asked)

    def _add(self, what: str) -> None:
        with self.changed:
            self.asked.append(what)
            self.changed.notify_all()


@pytest.fixture
def records() -> Any:
    return Records()


@pytest.fixture
def request_of(records: Any) -> Iterator[Callable[..., StopRequest]]:
    made: list[StopRequest] = []

    def make(*numbers: int, call: Any = None) -> StopRequest:
        request = StopRequest(call)
        made.append(request)
        request.install(numbers, 143)
        return request

    yield make
    for each in made:
        each.close()


def test_a_signal_is_in_the_store_before_the_ranks_agree(
    records: Any, request_of: Callable[..., StopRequest]
) -> None:
    request = request_of(signal.SIGUSR2, call=records)
    request.attach(records)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert records.until(2) == ["store: signal SIGUSR2 (143)", "agreement: signal SIGUSR2"]


def test_a_signal_between_two_iterations_reaches_the_next_agreement(
    records: Any, request_of: Callable[..., StopRequest]
) -> None:
    request = request_of(signal.SIGUSR2, call=records)
    before: Any = Records()
    request.attach(before)
    request.detach(before)
    os.kill(os.getpid(), signal.SIGUSR2)
    records.until(1)
    request.attach(records)
    assert records.until(2)[1] == "agreement: signal SIGUSR2"
    assert before.asked == ["closed"]


def test_a_lost_store_does_not_lose_the_request(
    records: Any, request_of: Callable[..., StopRequest]
) -> None:
    records.lost = True
    request = request_of(signal.SIGUSR2, call=records)
    request.attach(records)
    request.request("the machine goes")
    assert records.until(2)[1] == "agreement: the machine goes"


def test_a_signal_that_arrives_twice_is_one_request(
    records: Any, request_of: Callable[..., StopRequest]
) -> None:
    """As when a scheduler sends it to every process, and the launcher forwards it."""
    request = request_of(signal.SIGTERM)
    request.attach(records)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    request.close()
    assert records.asked == ["agreement: signal SIGTERM", "closed"]


def test_a_second_interrupt_has_its_usual_effect(request_of: Callable[..., StopRequest]) -> None:
    request = request_of(signal.SIGINT, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    request.close()


def test_a_forked_child_gets_the_signal_as_usual(request_of: Callable[..., StopRequest]) -> None:
    """As a worker process of a data loader that is terminated."""
    request_of(signal.SIGTERM)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_the_end_restores_the_handlers_but_not_over_a_later_one() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    request = StopRequest(None)
    request.install([signal.SIGUSR1, signal.SIGUSR2], 143)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    request.close()
    assert signal.getsignal(signal.SIGUSR1) == before
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_a_handler_that_replaces_that_of_the_job_is_named_once(
    request_of: Callable[..., StopRequest], caplog: pytest.LogCaptureFixture
) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    request = request_of(*before)
    for number in before:
        request.check_handlers()
        assert caplog.text == ""  # as `asyncio.run` replaces that of SIGINT
        signal.signal(number, lambda *_: None)
    for _ in range(2):
        request.check_handlers()
    assert caplog.text.count("the handler of SIGTERM was replaced after that of the job") == 1
    for number, handler in before.items():
        signal.signal(number, handler)


def test_no_handlers_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGUSR2)

    def make() -> None:
        request = StopRequest(None)
        request.install([signal.SIGUSR2], 143)
        request.close()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR2) == before
