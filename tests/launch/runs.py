"""`outlast run` as a real process, with workers that do what the test tells them by signals.

    with Run(tmp_path, WORKER, "--nproc-per-node=2") as run:
        first = run.start_job(2)           # as if outlast.inprocess.Wrapper ran a function there
        first[1].kill()
        second = run.ready(rank=1)         # the next process of this rank
        ...
        assert run.complete(first[0], second) == 0

Every process of a run has its id in the environment; the end of the block fails if one is left.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import select
import selectors
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

import zygote
from outlast.coordination.job_record import JOB_KEY
from outlast.coordination.records import COMPLETED_BY
from outlast.coordination.stores.torch_store import TorchStore
from procs import MARKER, NET_S, marked, torch_noise

WORKER = '''
"""Reports that it is ready, then exits on a signal: SIGUSR1 with 0, SIGUSR2 with 3."""
import json, os, signal, sys
woken, wakes = os.pipe()
os.set_blocking(wakes, False)
signal.set_wakeup_fd(wakes)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(3))
names = [n for n in os.environ if n.startswith(("OUTLAST_", "TORCHELASTIC_", "MASTER_", "RANK"))]
env = {n: os.environ[n] for n in names}
print(json.dumps({"pid": os.getpid(), "rank": int(os.environ["RANK"]), "env": env}), flush=True)
while True:
    os.read(woken, 1)  # not `signal.pause`, which does not see a signal that came just before it
'''


@dataclasses.dataclass(frozen=True)
class Ready:
    """A worker's message when it was ready; `more` contains what its script added."""

    pid: int
    rank: int
    env: dict[str, str]
    more: dict[str, Any]

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def succeed(self) -> None:
        self.kill(signal.SIGUSR1)

    def fail(self) -> None:
        self.kill(signal.SIGUSR2)


class Run:
    """A running `outlast run`, and what it has written so far."""

    def __init__(
        self,
        tmp_path: Path,
        script: str,
        *options: str,
        args: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
        module: bool = False,
        quiet: bool = True,
        launcher: str = "",
    ) -> None:
        self.id = uuid.uuid4().hex
        self.quiet = quiet  # torch logs no warnings of its own
        self.temporary = tmp_path / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self.script = tmp_path / "script.py"
        self.script.write_text(script)
        self.out = ""
        self.err = ""
        self._taken: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        # What takes long to import is there already, unless a test asks for standby processes.
        own_standbys = any(o.startswith("--standby") and o != "--standby=0" for o in options)
        imports = re.search(r"^\s*(from|import) (torch|outlast)\b", script, re.MULTILINE)
        command = [sys.executable, "-m", "outlast.launch", "run", "--standby=0"]
        if launcher:  # what it changes first, for other limits
            own = tmp_path / f"launcher-{self.id}.py"
            own.write_text(f"{launcher}\nfrom outlast.launch.cli import main\n\nmain()\n")
            command[1:3] = [str(own)]
        self.process = zygote.shared().start(
            [*command, *options, "script" if module else str(self.script), *args],
            env={**os.environ, "TMPDIR": str(self.temporary), **(env or {}), MARKER: self.id},
            cwd=tmp_path,
            # torch reads its log level when it is loaded, in the zygote.
            workers=bool(imports) and not own_standbys and "TORCH_CPP_LOG_LEVEL" not in (env or {}),
        )
        for name, stream in (("out", self.process.stdout), ("err", self.process.stderr)):
            assert stream is not None
            self._selector.register(stream, selectors.EVENT_READ, name)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        left = self.leftovers()
        self._selector.close()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        if error is None:
            assert not left, f"left behind: {left}\n{self.err}"
            assert not (self.quiet and (noise := torch_noise(self.err))), noise

    # ---------------------------------------------------------------------------- waiting

    def ready(self, rank: int) -> Ready:
        """Waits for the next ready process of `rank`."""
        said = self.until(lambda: self._said(rank), f"rank {rank} to be ready")
        self._taken[rank] = self._taken.get(rank, 0) + 1
        known = {name: said.pop(name) for name in ("pid", "rank", "env")}
        return Ready(**known, more=said)

    def start_job(self, size: int) -> list[Ready]:
        """The first worker of every rank, once all are there and a call of `Wrapper` has begun."""
        workers = [self.ready(rank) for rank in range(size)]
        self.set_job("running")
        return workers

    def complete(self, *workers: Ready) -> int:
        """Completes the call and ends these last workers of their ranks; returns the exit code."""
        self.set_job("completed")
        for worker in workers:
            worker.succeed()
        return self.wait()

    def until(self, found: Callable[[], Any], what: str) -> Any:
        """The first true result of `found`, which is called whenever there is new output."""
        deadline = time.monotonic() + NET_S
        while not (value := found()):
            assert self._selector.get_map(), f"ended, waiting for {what}:\n{self.out}\n{self.err}"
            assert self._read(deadline), f"waited in vain for {what}:\n{self.out}\n{self.err}"
        return value

    def until_said(self, text: str) -> None:
        """Waits until `text` is in the launcher's stderr."""
        self.until(lambda: text in self.err, repr(text))

    def wait(self, net_s: float = NET_S) -> int:
        """The exit code, once it has ended and all its output is read."""
        deadline = time.monotonic() + net_s
        while self._selector.get_map():
            assert self._read(deadline), f"still running:\n{self.out}\n{self.err}"
        return self.process.wait(NET_S)

    # ---------------------------------------------------------------------------- looking

    @property
    def words(self) -> list[str]:
        """The launcher's own lines, without their time."""
        own = re.compile(r"\[outlast\] \d\d:\d\d:\d\d (.*)")
        lines = [line for line in self.err.splitlines() if line.startswith("[outlast]")]
        return [found[1] if (found := own.fullmatch(line)) else line for line in lines]

    @property
    def worker_errors(self) -> list[str]:
        """The lines on stderr, without the launcher's own."""
        return [line for line in self.err.splitlines() if not line.startswith("[outlast]")]

    @property
    def verdict(self) -> str:
        """The launcher's last line, without the duration of the job."""
        last = self.words[-1].partition("; this host took part for ")[0]
        return last.rpartition(" after ")[0] or last

    def alive(self) -> list[psutil.Process]:
        """All processes of the run, except the launcher itself."""
        return [process for process in marked(self.id) if process.pid != self.process.pid]

    def leftovers(self) -> list[str]:
        """Kills and returns the processes still alive a moment after the end of the launcher."""
        left = []
        for process in self.alive():
            if not ends(process.pid):
                left.append(f"{process}")
                process.kill()
        return left

    def set_job(self, state: str, by: Iterable[Ready] = (), **fields: Any) -> None:
        """Writes the record that `Wrapper` keeps in the launcher's store; the call was completed
        `by` these workers.
        """
        store = self.store()
        names = b"".join(f"{worker.pid}\n".encode() for worker in by)
        if names:
            fields = {"prefix": "call/", **fields}
        store.put(fields.get("prefix", "") + COMPLETED_BY, names)
        store.put(JOB_KEY, json.dumps({"call": 0, "state": state, **fields}).encode())
        store.read(JOB_KEY)  # torch's client does not wait for the answer to a put

    def store(self) -> TorchStore:
        """A connection to the launcher's store."""
        env = self._said_any()["env"]
        # On many hosts MASTER_ADDR is that of the host of rank 0, which may be lost.
        own = env.get("OUTLAST_STORE") or f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
        host, _, port = own.rpartition(":")
        store = dist.TCPStore(
            host,
            int(port),
            is_master=False,
            timeout=datetime.timedelta(seconds=NET_S),
        )
        return TorchStore(store, "the launcher's store")

    # ---------------------------------------------------------------------------- private

    def _read(self, deadline: float) -> bool:
        ready = self._selector.select(max(0.0, deadline - time.monotonic()))
        for key, _ in ready:
            data = os.read(key.fd, 65536)
            setattr(self, key.data, getattr(self, key.data) + data.decode())
            if not data:
                self._selector.unregister(key.fileobj)
        return bool(ready)

    def _all_said(self) -> list[dict[str, Any]]:
        whole = self.out[: self.out.rfind("\n") + 1]
        texts = (line.partition(" ")[2] for line in whole.splitlines())
        return [json.loads(text) for text in texts if text.startswith('{"pid"')]

    def _said(self, rank: int) -> dict[str, Any] | None:
        of_rank = [said for said in self._all_said() if said["rank"] == rank]
        taken = self._taken.get(rank, 0)
        return of_rank[taken] if len(of_rank) > taken else None

    def _said_any(self) -> dict[str, Any]:
        return self._all_said()[0]


def ends(pid: int) -> bool:
    """Waits for the end of a process; returns whether it ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        waiter = select.poll()
        waiter.register(pidfd, select.POLLIN)
        return bool(waiter.poll(15_000))
    finally:
        os.close(pidfd)
