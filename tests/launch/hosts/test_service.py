"""The host service of one agent, in this process."""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.coordination.replicated.hosts import HostJoined
from outlast.errors import StoreError
from outlast.launch.hosts.host_group import GroupSpec
from outlast.launch.hosts.replicated import founding
from outlast.launch.hosts.replicated.group import ReplicatedGroup
from outlast.launch.hosts.replicated.membership import Membership
from outlast.launch.hosts.replicated.service import HostService
from outlast.system.lease_page import LeasePage
from outlast.system.processes import readable
from procs import free_port

NET_S = 60.0


@pytest.fixture
def page(tmp_path: Path) -> Iterator[LeasePage]:
    page = LeasePage.create(tmp_path)
    yield page
    page.close()


def group_of(page: LeasePage) -> ReplicatedGroup:
    endpoints = (("127.0.0.1", free_port()),)
    return ReplicatedGroup(GroupSpec(run_id="one", endpoints=endpoints, page=page, lease_s=NET_S))


@pytest.fixture
def group(page: LeasePage, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplicatedGroup]:
    monkeypatch.setattr(founding, "SILENCE_S", 0.0)  # no other group is alive
    group = group_of(page)
    group.start()
    yield group
    group.close(leave=True)


def test_a_failure_of_the_service_is_an_error_and_no_hang(
    group: ReplicatedGroup,
    page: LeasePage,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(membership: Membership) -> None:
        raise ArithmeticError("broken")

    waited: list[str] = []

    def wait() -> None:
        with pytest.raises(StoreError) as caught:
            group.store.wait_for("never", None)
        waited.append(str(caught.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    with caplog.at_level(logging.CRITICAL, logger="outlast.launch.hosts.replicated.service"):
        monkeypatch.setattr(Membership, "pump", broken)
        waiting.join()
    reason = "its host service failed: ArithmeticError: broken"
    assert reason in waited[0]
    with pytest.raises(StoreError, match=reason):
        group.store.put("k", b"v")
    state = group.poll()
    assert state.error == reason
    assert not page.valid()  # the workers must end now


def test_a_change_makes_the_wakeup_descriptor_readable_until_it_is_polled(
    group: ReplicatedGroup,
) -> None:
    assert readable(group.wakeup_fd(), timeout=60.0)
    state = group.poll()
    while not (state.chain and state.leader):  # they may change one after the other
        assert readable(group.wakeup_fd(), timeout=60.0)
        state = group.poll()
    [entry] = state.chain
    assert isinstance(entry, HostJoined)
    assert entry.info.id == group.me.id
    assert state.leader == group.me.id
    assert not readable(group.wakeup_fd(), timeout=0.0)
    group.close(leave=True)
    with pytest.raises(StoreError, match="has left"):
        group.store.read("k")


@pytest.mark.slow
def test_nobody_is_told_of_a_restart_before_a_host_with_a_read_lease(
    group: ReplicatedGroup, page: LeasePage, tmp_path: Path
) -> None:
    second = LeasePage.create(tmp_path)
    spec = dataclasses.replace(group._spec, page=second, local_addr="127.0.0.2")
    joined = ReplicatedGroup(spec)
    joined.start()
    try:
        pages = {group.me.id: page, joined.me.id: second}
        for host in pages:
            joined.workers.put(f"outlast/0/1/read-lease/{host}", b"1")
        for each in pages.values():
            while not each.unchanged(each.covered):  # until its next heartbeat is answered
                time.sleep(0.01)
        for number, asks in enumerate([group, joined, group], 1):
            waiting = threading.Thread(
                target=joined.workers.wait_for, args=(f"outlast/0/1/over/{number}", NET_S)
            )
            waiting.start()
            assert asks.workers.claim(f"outlast/0/1/over/{number}", b"restart") == b"restart"
            assert [each.covered for each in pages.values()] == [number, number]
            waiting.join()
    finally:
        joined.close(leave=True)
        second.close()


class Interrupt(BaseException):
    pass


def test_a_signal_before_the_thread_takes_calls_ends_it(
    page: LeasePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, begins, closes = threading.get_ident(), threading.Event(), threading.Event()
    raised = threading.Event()
    begin, close = HostService._begin, HostService.close

    def late(self: HostService, *given: Any) -> None:
        begins.set()
        assert closes.wait(NET_S)
        time.sleep(0.1)  # for what `close` does without waiting; if it waits, this is no race
        begin(self, *given)

    def closing(self: HostService, *, leave: bool) -> None:
        closes.set()
        close(self, leave=leave)

    def interrupt() -> None:
        assert begins.wait(NET_S)
        # Again, if it came when that thread was about to wait: no handler runs then.
        while not raised.wait(0.05):
            signal.pthread_kill(main, signal.SIGUSR2)

    def on_signal(*_: Any) -> None:
        if not raised.is_set():
            raised.set()
            raise Interrupt

    monkeypatch.setattr(HostService, "_begin", late)
    monkeypatch.setattr(HostService, "close", closing)
    before = signal.signal(signal.SIGUSR2, on_signal)
    sender = threading.Thread(target=interrupt)
    try:
        sender.start()
        with pytest.raises(Interrupt):
            group_of(page).start()
    finally:
        signal.signal(signal.SIGUSR2, before)
        sender.join()


def test_a_group_whose_thread_has_not_started_can_be_closed(
    page: LeasePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: HostService) -> None:
        raise Interrupt

    monkeypatch.setattr(HostService, "start", start)
    with pytest.raises(Interrupt):
        group_of(page).start()
