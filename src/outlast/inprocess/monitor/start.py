"""Forks the monitor process of a rank, and dismisses it at the end of the call.

The process is forked, not spawned: torch is already imported, and its pages stay shared. The child
uses nothing from the parent except the contents of `MonitorPlan`; it closes all other descriptors,
so no connection of the main process outlives that process. It leads a new session: a signal to the
main process's process group does not reach it. It exits by itself, when the main process dismisses
it, or has ended and been reported. A monitor that serves the store stays until every member has
said goodbye or is known to be lost.

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
import socket
import sys

import psutil

from outlast.errors import StoreError
from outlast.inprocess.monitor.loop import MonitorLoop
from outlast.inprocess.monitor.reports import MonitorPlan, write_line
from outlast.system.error_text import first_line
from outlast.system.fork import fork_detached
from outlast.system.processes import open_process, readable

# Monitor processes that outlived a call of this process, because other ranks need the store that
# they serve, and the port of that store. Not by descriptor: nothing is held open between calls.
_earlier_servers: list[tuple[psutil.Process, int]] = []


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
    ours, theirs = socket.socketpair()
    main = os.getpid()
    pid = fork_detached(lambda: _run_child(plan, main, theirs, log), new_session=True)
    theirs.close()
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
