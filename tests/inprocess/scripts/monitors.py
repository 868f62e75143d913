"""A monitor process without the rest of the wrapper: its main process is driven by the test."""

from __future__ import annotations

import dataclasses
import os
import select
import sys

from rank import main, say, scenario
from rank_actions import wait_forever

from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, drive, perform_on
from outlast.coordination.stores.torch_store import TorchStore
from outlast.inprocess.monitor.reports import MonitorPlan
from outlast.inprocess.monitor.shared_page import Activity, SharedPage
from outlast.inprocess.monitor.start import MonitorHandle, start_monitor
from outlast.inprocess.store import TCPStore
from outlast.inprocess.timeouts import Timeouts

NET_S = 60.0


def _start(page: SharedPage, port: int, serve: bool) -> MonitorHandle:
    plan = MonitorPlan(
        page=page,
        factory=TCPStore,
        kwargs={"host_name": "127.0.0.1", "port": port},
        endpoint=("127.0.0.1", port),
        serve=serve,
        ready="served" if serve else "",
        prefix="call/",
        rank=0,
        world_size=1,
        token="token",
        durations=dataclasses.replace(
            Timeouts().in_seconds(),
            monitor_interval=0.05,
            heartbeat=NET_S,
            soft=NET_S,
            hard=NET_S,
            ping=600.0,
            grace=1.0,
            barrier=NET_S,
        ),
        logfile=None,
        events_dir="",
    )
    return start_monitor(plan)


def _closed_everywhere(descriptor: int) -> bool:
    """Whether no process holds the other end of a pipe open."""
    ready, _, _ = select.select([descriptor], [], [], 0)
    return bool(ready) and os.read(descriptor, 1) == b""


@scenario
def watched() -> None:
    """Reports when the monitor works, and waits for its end."""
    page = SharedPage()
    readable, writable = os.pipe()
    handle = _start(page, 0, serve=True)
    os.close(writable)
    assert handle.endpoint is not None
    store = TorchStore(TCPStore(host_name="127.0.0.1", port=handle.endpoint[1]), "")
    page.member = (
        drive(MembershipProtocol(Link("call/"), 1).register(0, "token"), perform_on(store)) or 0
    )
    page.iteration = 0
    store.wait_for("call/beat/0", NET_S)
    say("beats", monitor=handle.pid, closed=_closed_everywhere(readable))
    wait_forever()


@scenario
def dismissed() -> None:
    """Dismisses the monitor."""
    server = TCPStore.serve(host_name="127.0.0.1", port=0)
    page = SharedPage()
    handle = _start(page, server.port, serve=False)
    page.member = 0  # one that never registered would be reported as gone
    page.activity = Activity.DONE
    handle.dismiss(NET_S)
    try:
        os.waitpid(handle.pid, 0)
    except ChildProcessError:
        say("gone", lost=bool(server.check(["call/ledger"])))
    sys.stdout.flush()


main()
