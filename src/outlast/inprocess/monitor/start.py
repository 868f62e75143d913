"""Forks the monitor process of a rank, and dismisses it at the end of the call.

The process is forked, not spawned: torch is already imported, and its pages stay shared. The child
uses nothing from the parent except the contents of `MonitorPlan`; it closes all other descriptors,
so no connection of the main process outlives that process. It leads a new session: a signal to the
main process's process group does not reach it. It exits by itself, when the main process dismisses
it, or has ended and been reported. A monitor that serves the store stays until every member has
said goodbye or is known to be lost.

A standby process forks that of its first call while it waits (`fork_ahead`). To fork it in the
restart would take as long as half of a call's other preparations, and most of its memory would be
copied then, page by page, at the first write to each.

A call that failed on this rank does not wait for that: the other ranks may still be leaving it. The
next call of this process on the same port waits instead, until the port is free.

Its work while it runs: `monitor/loop.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pickle
import socket
import sys
from collections.abc import Callable

import psutil

from outlast.coordination.repeated_faults import RepeatedFaults
from outlast.errors import StoreError
from outlast.inprocess.monitor.loop import MonitorLoop
from outlast.inprocess.monitor.reports import MonitorPlan, write_line
from outlast.inprocess.monitor.shared_page import SharedPage
from outlast.inprocess.store import TCPStore
from outlast.system.error_text import first_line
from outlast.system.fork import fork_detached
from outlast.system.processes import open_process, readable

# Monitor processes that outlived a call of this process, because other ranks need the store that
# they serve, and the port of that store. Not by descriptor: nothing is held open between calls.
_earlier_servers: list[tuple[psutil.Process, int]] = []

# The process that was forked ahead, behind the one that has forked it.
_ahead: tuple[int, int, socket.socket, os.stat_result] | None = None
_RULES = (type(None), RepeatedFaults)
_LENGTH = 4


class MonitorHandle:
    """The main process's side of its monitor process."""

    def __init__(
        self, pid: int, end: socket.socket, endpoint: tuple[str, int] | None, serves: bool
    ) -> None:
        self.pid = pid
        self.socket = end  # readable when the monitor process has ended
        # Of the store; if the monitor serves it, with the port that the system chose.
        self.endpoint, self._serves = endpoint, serves

    def watch_threads(self) -> None:
        with contextlib.suppress(OSError):  # it has ended: the heartbeat thread notices
            self.socket.send(b"T")

    def wake(self) -> None:
        """Lets the monitor look at the timeouts now: one may have become shorter."""
        # It has ended, which the heartbeat thread notices; or it has not read what woke it before.
        with contextlib.suppress(OSError):
            self.socket.send(b"W", socket.MSG_DONTWAIT)

    def dismiss(self, timeout: float) -> None:
        """Dismisses the monitor, and waits `timeout` seconds at most: it may serve other ranks."""
        with contextlib.suppress(OSError):  # it has ended already
            self.socket.send(b"B")
        ended = bool(readable(self.socket.fileno(), timeout=timeout))
        self.socket.close()
        if ended:
            self.reap()
        elif self._serves and self.endpoint is not None:
            with contextlib.suppress(psutil.NoSuchProcess):  # ended just now
                _earlier_servers.append((psutil.Process(self.pid), self.endpoint[1]))

    def reap(self) -> None:
        """Reaps a monitor that has ended, so that no zombie remains."""
        # There is nothing to reap where the program ignores SIGCHLD, or reaps all its children.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def start_monitor(plan: MonitorPlan) -> MonitorHandle:
    """Forks the monitor process. If it is to serve the store, waits until it does; a `StoreError`
    names host and port if it cannot. Else returns at once: a monitor process that is lost is
    replaced. A `StoreError`, too, if its log cannot be opened.
    """
    if plan.serve and plan.endpoint is not None:
        _await_earlier_servers(plan.endpoint, plan.durations.barrier)
    target = plan.logfile.replace("{rank}", str(plan.rank)) if plan.logfile else os.devnull
    try:
        log = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as e:
        raise StoreError(f"the monitor process cannot write to its log: {e}") from e
    pid, ours = _told(plan, log) or _fork(lambda end, main: _run_child(plan, main, end, log))
    os.close(log)
    if not plan.serve:
        return MonitorHandle(pid, ours, plan.endpoint, False)
    ours.settimeout(plan.durations.barrier)
    try:
        reply = json.loads(ours.recv(65536) or b'{"error": "the monitor process ended"}')
    except TimeoutError:
        reply = {"error": f"the monitor process was not up within {plan.durations.barrier} s"}
    ours.settimeout(None)
    if "error" in reply:
        ours.close()
        os.waitpid(pid, 0)
        raise StoreError(reply["error"])
    endpoint = plan.endpoint and (plan.endpoint[0], reply["port"])
    return MonitorHandle(pid, ours, endpoint, True)


def fork_ahead() -> None:
    """Forks the monitor process of the first call of this process: it waits for its plan."""
    global _ahead
    pid, ours = _fork(_await_plan)
    _ahead = os.getpid(), pid, ours, os.fstat(ours.fileno())


def _fork(body: Callable[[socket.socket, int], None]) -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair()
    main = os.getpid()
    with theirs:
        return fork_detached(lambda: body(theirs, main), new_session=True), ours


def _told(plan: MonitorPlan, log: int) -> tuple[int, socket.socket] | None:
    """The process that was forked ahead, which has got this plan; `None` if there is none for it:
    it has no objects of the program, whose script had not run, and serves no store.
    """
    global _ahead
    if _ahead is None:
        return None
    (main, pid, ours, file), _ahead = _ahead, None
    if not _is_open(ours.fileno(), file):  # the program has closed all descriptors, as daemons do
        ours.detach()
        return None
    if main != os.getpid():  # it is another one's child
        ours.close()
        return None
    with contextlib.suppress(OSError, TypeError, AttributeError, pickle.PicklingError):
        told = pickle.dumps(({**vars(plan), "page": None}, dict(os.environ)))
        of_outlast = plan.factory is TCPStore and type(plan.rules.repeated) in _RULES
        of_outlast &= b"__main__" not in told
        if of_outlast and not plan.serve and plan.page.descriptor >= 0:
            socket.send_fds(ours, [len(told).to_bytes(_LENGTH, "big")], [log, plan.page.descriptor])
            ours.sendall(told)
            return pid, ours
    ours.shutdown(socket.SHUT_RDWR)  # not only closed: a child of this process may have it, too
    ours.close()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return None


def _is_open(descriptor: int, file: os.stat_result) -> bool:
    """Whether it is still open: another file may have the number by now."""
    try:
        return os.path.samestat(os.fstat(descriptor), file)
    except OSError:
        return False


def _await_plan(end: socket.socket, main: int) -> None:
    end = _replace_descriptors(end, os.open(os.devnull, os.O_WRONLY))
    length, descriptors, _, _ = socket.recv_fds(end, _LENGTH, 2)
    told = end.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
    if not told:
        return  # the standby process has ended, or its call has another one
    log, page = descriptors
    values, environment = pickle.loads(told)
    os.environ.update(environment)
    plan = MonitorPlan(**{**values, "page": SharedPage.at(page)})
    plan.page.close()
    _run_child(plan, main, end, log)


def _await_earlier_servers(endpoint: tuple[str, int], timeout: float) -> None:
    """Waits until no monitor process of an earlier call serves a store on this port.

    It ends once every rank has left that call; none of them waits for this rank, which has left it.
    """
    for entry in list(_earlier_servers):
        process, port = entry
        pidfd = open_process(process.pid) if process.is_running() else None
        if pidfd is not None:
            try:
                ended = readable(pidfd, timeout=timeout if port == endpoint[1] else 0.0)
            finally:
                os.close(pidfd)
            if not ended:
                if port != endpoint[1]:
                    continue
                raise StoreError(
                    f"the store cannot be served at {endpoint[0]}:{port}: process {process.pid} "
                    f"still serves the store of an earlier call there, because other ranks have "
                    f"not left that call within {timeout} s"
                )
            with contextlib.suppress(ChildProcessError):  # reaped by the program
                os.waitpid(process.pid, 0)
        _earlier_servers.remove(entry)


def _run_child(plan: MonitorPlan, main: int, end: socket.socket, log: int) -> None:
    end = _replace_descriptors(end, log)
    server = None
    if plan.serve:
        try:
            server = plan.factory.serve(**plan.kwargs)
        except (StoreError, RuntimeError) as e:
            write_line(first_line(e))
            end.send(json.dumps({"error": first_line(e)}).encode())
            return
        port = server.port
        server.set(plan.ready, "1")
        if plan.endpoint is not None:
            plan = dataclasses.replace(plan, endpoint=(plan.endpoint[0], port))
        end.send(json.dumps({"port": port}).encode())
    MonitorLoop(plan, main, end, server).run()


def _replace_descriptors(end: socket.socket, log: int) -> socket.socket:
    """Closes all descriptors but `end`, returned with another number; opens standard streams."""
    # Where the main process has closed descriptors 0 to 2, other files may have these numbers.
    keep = fcntl.fcntl(end.detach(), fcntl.F_DUPFD_CLOEXEC, 3)
    log = fcntl.fcntl(log, fcntl.F_DUPFD, 3)
    null = fcntl.fcntl(os.open(os.devnull, os.O_RDONLY), fcntl.F_DUPFD, 3)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for the process's life
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    return socket.socket(fileno=keep)
