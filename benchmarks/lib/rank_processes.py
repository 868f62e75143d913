"""Starts rank processes by fork, with torch already imported, and ends them all afterwards."""

from __future__ import annotations

import functools
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from benchmarks.lib.process_tree import adopt_orphans, die_with_parent, end_descendants

__all__ = ["FOLDER", "RankProcesses", "free_port", "serve", "store", "wrapped"]

FOLDER = Path("build/benchmarks")

T = TypeVar("T")


def free_port() -> int:
    """A free port below the range of ephemeral ports."""
    for port in random.SystemRandom().sample(range(15_000, 32_000), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


def wrapped(function: Callable[..., T], wrapper: Callable[[Any], Any]) -> Callable[[], T]:
    """`function` wrapped by `wrapper`, which supplies its argument."""
    return cast("Callable[[], T]", wrapper(function))


def store(port: int, *, serves: bool = False) -> Any:
    """A torch store on this host: a client connection, or the server."""
    kind: Any = dist.TCPStore  # type: ignore[attr-defined]
    return kind("127.0.0.1", port, is_master=serves, wait_for_workers=False)


def serve(port: int) -> None:
    """Serves a store until this process is killed."""
    server = store(port, serves=True)
    signal.pause()
    del server


class RankProcesses:
    """The processes of one job.

    Args:
        name: the name of its folder, for the output and the events of the ranks.
        size: the number of ranks.
        env: environment variables for all ranks.
    """

    def __init__(self, name: str, size: int, env: Mapping[str, str] | None = None) -> None:
        self.size = size
        self.port = free_port()
        self.folder = (FOLDER / name).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("*"):
            old.unlink()
        self.env = dict(env or {})
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}

    def __enter__(self) -> RankProcesses:
        adopt_orphans()
        return self

    def __exit__(self, *error: object) -> None:
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()
        end_descendants()

    def start(
        self, slot: int, target: Callable[[], None], env: Mapping[str, str] | None = None
    ) -> None:
        """Forks a rank that calls `target`. A negative slot is a helper process, not a rank."""
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._child(slot, target, {} if env is None else env)
        self.pids[slot] = pid
        self.codes.pop(slot, None)
        self._pidfds[slot] = os.pidfd_open(pid)

    def start_all(self, target: Callable[[int], None]) -> None:
        """Forks every rank; each calls `target` with its slot."""
        for slot in range(self.size):
            self.start(slot, functools.partial(target, slot))

    def ended(self, timeout: float) -> list[int]:
        """The slots of processes that have ended; waits up to `timeout` seconds for one."""
        poll = select.poll()
        for pidfd in self._pidfds.values():
            poll.register(pidfd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(timeout * 1000)}
        slots = [slot for slot, pidfd in self._pidfds.items() if pidfd in ready]
        for slot in slots:
            os.close(self._pidfds.pop(slot))
            self.codes[slot] = os.waitstatus_to_exitcode(os.waitpid(self.pids[slot], 0)[1])
        return slots

    def wait_all(self, timeout: float) -> None:
        """Waits for the end of every rank.

        Raises:
            RuntimeError: if one fails, or after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while any(slot >= 0 for slot in self._pidfds):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the ranks did not end within {timeout} s\n{self.last_output()}"
                )
            self.ended(1.0)
            self.check()

    def check(self, allowed: tuple[int, ...] = (0,)) -> None:
        """Raises `RuntimeError` if a rank has ended with another exit code."""
        bad = {slot: code for slot, code in self.codes.items() if code not in allowed}
        if bad:
            raise RuntimeError(f"exit codes by slot: {bad}\n{self.last_output()}")

    def last_output(self) -> str:
        """The last output of every rank."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-1000:]}" for f in files)

    def _child(self, slot: int, target: Callable[[], None], env: Mapping[str, str]) -> None:
        code = 1
        try:
            os.setsid()
            # If this process is killed, its ranks end too, and their monitors after them.
            die_with_parent()
            log = os.open(
                self.folder / f"slot{slot}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
            )
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            for pidfd in self._pidfds.values():
                os.close(pidfd)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.environ.update(
                RANK=str(max(slot, 0)),
                LOCAL_RANK=str(max(slot, 0)),
                WORLD_SIZE=str(self.size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(self.port),
            )
            os.environ.update({**self.env, **env})
            torch.set_num_threads(1)
            target()
            code = 0
        except BaseException:  # noqa: BLE001 - the last frame of this process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
