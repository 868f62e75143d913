"""Training processes on the hosts of a network, what they wrote, and what must hold at the end.

cluster = Cluster(network, tmp_path)
cluster.agents("h1", "h2", "h3", options=("--nnodes=2:3",))
cluster.until_step(10)
network["h1"].power_off()
...
cluster.check(weights)
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from host import HostProcess
from network import Network

from procs import NET_S
from zygote import is_shared, shared

EXAMPLE = Path(__file__).parents[2] / "examples" / "hosts"
TRAIN = EXAMPLE / "train.py"
SHARDED = Path(__file__).parent / "scripts" / "sharded.py"
HOLD_AT = 60
"""The step at which training waits for `Cluster.go`, so that it cannot end before the fault."""
STEPPING = ("--pause=0.5", "--hold-at=115")
"""For a job that grows: it does so at the end of a step, and so not while it waits in one."""
LINGER_S = 20.0
LEASE_S = 4.0
"""Long enough for an agent to be scheduled while the processors have much to do."""
LEADS = re.compile(r"(\w+) leads the hosts \(term (\d+)\)")


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step of one process, as it has recorded it itself."""

    host: str
    pid: int
    rank: int
    size: int
    iteration: int
    step: int
    time: float  # of the machine's clock, comparable between hosts


class Started:
    """A process on a host, and its output."""

    def __init__(self, host: str, process: HostProcess, log: Path) -> None:
        self.host = host
        self.process = process
        self._log = log

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")


class Cluster:
    """The processes that a test has started on the hosts of a network.

    Args:
        forks: whether Python programs come from the zygote, where there is one.
    """

    def __init__(self, network: Network, folder: Path, *, forks: bool = True) -> None:
        self.network = network
        self.started: list[Started] = []
        self.trace = folder / "trace"
        self.events = folder / "events"
        self._folder = folder
        self._forks = forks and is_shared()
        self._go = folder / "go"
        self.trace.mkdir()

    # ------------------------------------------------------------------------ starting

    def start(
        self, host: str, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> Started:
        """Starts a Python program on a host."""
        log = self._folder / f"{len(self.started)}-{host}.log"
        temporary = self._folder / f"tmp-{host}"
        temporary.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "TMPDIR": str(temporary),
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            **(env or {}),
        }
        program, machine = [sys.executable, *command], self.network[host]
        with log.open("wb") as out:
            if not self._forks or "LD_PRELOAD" in environment or command[0] == "-c":
                process = machine.start(program, environment, self._folder, stdout=out, stderr=out)
                return self.adopt(host, process, log)
            outer = shared().start(
                program,
                environment,
                self._folder,
                stdout=out.fileno(),
                stderr=out.fileno(),
                workers="outlast.launch" in command,
                host=machine.init,
            )
        return self.adopt(host, machine.adopt(outer), log)

    def adopt(self, host: str, process: HostProcess, log: Path) -> Started:
        """Counts a process that was started on a host in another way as one of the job."""
        self.started.append(Started(host, process, log))
        return self.started[-1]

    def rank(self, host: str, rank: int, size: int, script: Path) -> Started:
        """Starts one rank by hand, with the store at h1."""
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": self.network.address("h1"),
            "MASTER_PORT": "29400",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OUTLAST_EVENTS_DIR": str(self.events),
        }
        return self.start(host, [str(script), *self.training_options()], env)

    def agent(
        self,
        host: str,
        *options: str,
        script: Path = TRAIN,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Started:
        """Starts `outlast run` on a host; the first three hosts are the endpoints."""
        first = list(self.network.names)[:3]
        endpoints = ",".join(f"{name}:29400" for name in first)
        common = ["--rdzv-id", "test", "--standby", "0", "--max-restarts", "10"]
        limits = [
            "--host-timeout",
            str(LEASE_S),
            "--rdzv-conf",
            f"last_call_timeout=5,record_dir={self._folder / 'records'}",
        ]
        meet = [] if "--rdzv-endpoint" in options else ["--rdzv-endpoint", endpoints]
        events = ["--events-dir", str(self.events)]
        run = ["-m", "outlast.launch", "run", *common, *limits, *meet, *events, *options]
        return self.start(host, [*run, str(script), *self.training_options(), *args], env)

    def leader(self, *, term: int = 0) -> str:
        """The host that leads the others in the newest term, of at least this number."""

        def found() -> str | None:
            lines = [line for p in self.started for line in LEADS.findall(p.output)]
            terms = {int(number): name for name, number in lines}
            return terms[max(terms)] if terms and max(terms) >= term else None

        return str(self.until(found, f"a leader of term {term}"))

    def term(self) -> int:
        """The newest term of which an agent has told."""
        return max(int(term) for p in self.started for _, term in LEADS.findall(p.output))

    def host_of(self, rank: int) -> str:
        """The host on which this rank has made its last step. Waits for its first one: another rank
        may have made a step before.
        """

        def found() -> str | None:
            return next((step.host for step in reversed(self.steps()) if step.rank == rank), None)

        return str(self.until(found, f"a step of rank {rank}"))

    def training_options(self) -> list[str]:
        state, hold = self._folder / "state", str(HOLD_AT)
        options: list[object] = ["--state", state, "--trace", self.trace, "--hold-at", hold]
        return [str(option) for option in [*options, "--go", self._go]]

    def go(self) -> None:
        """Lets training go on beyond `HOLD_AT`."""
        self._go.touch()

    # ------------------------------------------------------------------------ waiting

    def until(self, found: Callable[[], Any], what: str) -> Any:
        """The first true result of `found`."""
        deadline = time.monotonic() + NET_S
        while not (value := found()):
            if time.monotonic() > deadline:
                self.fail(f"waited in vain for {what}")
            time.sleep(0.02)
        return value

    def until_step(self, step: int, iteration: int = 0, size: int | None = None) -> Step:
        """Waits until a process has made `step`, or a later one, in this iteration or a later."""
        return self.until(  # type: ignore[no-any-return]
            lambda: next(
                (
                    s
                    for s in self.steps()
                    if s.step >= step and s.iteration >= iteration and size in (None, s.size)
                ),
                None,
            ),
            f"step {step} of iteration {iteration} with {size or 'any number of'} ranks",
        )

    def until_stepped_by(self, iteration: int, hosts: set[str]) -> None:
        """Waits until these hosts, and no others, have made a step in this iteration: some say so
        later than others.
        """
        self.until(
            lambda: {s.host for s in self.steps() if s.iteration == iteration} == hosts,
            f"steps of iteration {iteration} on {sorted(hosts)}",
        )

    def until_said(self, pattern: str, *processes: Started) -> re.Match[str]:
        """Waits until the output of one of these processes, or of any, has a match."""
        return self.until(  # type: ignore[no-any-return]
            lambda: next(
                (m for p in processes or self.started if (m := re.search(pattern, p.output))), None
            ),
            repr(pattern),
        )

    def wait(self, *processes: Started) -> list[int]:
        """The exit codes of these processes, or of all, once they have ended."""
        chosen = processes or self.started
        self.until(lambda: all(p.process.poll() is not None for p in chosen), "the end")
        return [p.process.wait() for p in chosen]

    def fail(self, why: str) -> None:
        """Fails the test, with the output of all; Python prints the stacks of what still runs."""
        for host in self.network:
            for pid in host.pids():
                os.kill(pid, signal.SIGABRT)
        time.sleep(0.5)
        raise AssertionError(f"{why}\n{self.output()}")

    def output(self) -> str:
        return "\n".join(f"---- {p.host}\n{p.output[-6000:]}" for p in self.started)

    def training(self, host: str) -> list[int]:
        """The processes on a host that have made steps, and have not ended."""
        made = {step.pid for step in self.steps() if step.host == host}
        alive = []
        for pid in self.network[host].pids():
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue  # it has ended
            inside = re.search(r"NSpid:.*\t(\d+)\n", status)
            if inside and int(inside[1]) in made and "State:\tZ" not in status:
                alive.append(pid)
        return alive

    # ------------------------------------------------------------------------ checking

    def steps(self) -> list[Step]:
        """All steps that were recorded so far, in the order of time."""
        found = []
        for file in self.trace.iterdir():
            for line in file.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    step = Step(**json.loads(line))
                    at = step.time - self.network[step.host].clock_offset_s
                    found.append(dataclasses.replace(step, time=at))
        return sorted(found, key=lambda step: step.time)

    def check(self, weights: str, first: int = 0, frozen: str = "") -> None:
        """After the end of the job: the weights, one view at a time, and nothing left over.

        Args:
            first: the first step to look at, of those that were recorded.
            frozen: a host that was stopped, or cut off without a launcher. Its worker may finish
                the step whose data had left the other ranks before (TCP sends it again when the
                network heals), in the moment until it ends; that step reaches no other rank.
        """
        said = [m[1] for p in self.started if (m := re.search(r"weights (\w+)", p.output))]
        assert set(said) == {weights}, f"{said}, not {weights}\n{self.output()}"
        self.check_views(first, frozen)
        self.check_nothing_left()

    def check_views(self, first: int = 0, frozen: str = "") -> None:
        """Every member of an iteration has its own rank below the same world size (R1); no step
        of an iteration is made after the first step of the next one (R2), on whatever host.
        """
        steps = self.steps()[first:]
        left = next((s.time for s in steps if s.iteration > 0), float("inf"))
        finished = [s for s in steps if s.host == frozen and not s.iteration and s.time > left]
        assert len(finished) <= 1, finished
        steps = [s for s in steps if s not in finished]
        for iteration in sorted({step.iteration for step in steps}):
            members = {(s.host, s.pid, s.rank, s.size) for s in steps if s.iteration == iteration}
            ranks = [rank for _, _, rank, _ in members]
            sizes = {size for _, _, _, size in members}
            assert len(set(ranks)) == len(ranks), f"iteration {iteration}: {members}"
            assert len(sizes) == 1, f"iteration {iteration}: {members}"
            assert max(ranks) < max(sizes), f"iteration {iteration}: {members}"
        for earlier, later in itertools.pairwise(steps):
            assert earlier.iteration <= later.iteration, f"{later} after {earlier}"

    def check_nothing_left(self) -> None:
        """No host that is on has a process left; of the agents, no temporary file is left."""
        deadline = time.monotonic() + LINGER_S
        for host in self.network:
            while pids := host.pids():
                if time.monotonic() > deadline:
                    lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
                    raise AssertionError(f"left on {host.name}: {lines}\n{self.output()}")
                time.sleep(0.02)
