"""Job histories: a real training on three hosts, with an agent each, under random faults.

At the end, when all is healed: every agent that was not killed ends with code 0, the weights are
those of an undisturbed run bit by bit, every step is once in the final lineage, no two views have
trained at a time, and no process is left.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from host import _state as process_state
from network import Network

from hosts.cluster import LEASE_S, STEPPING, TRAIN, Cluster, Started

from ..calls import Calls
from ..crash_states import Result
from ..one_trial import one_trial
from . import members, shaker
from .faults import KINDS, Fault, Faults, plan

FAULTS_S = 25
LAST_STEP = 120
_DRAIN = ["-m", "outlast.launch", "drain", "--rdzv-id=test", "--timeout=5"]
_WHERE = ["--rdzv-endpoint=h1:29400,h2:29400,h3:29400"]
_LINGER_S = 60.0
"""How long processes may take to end after the agents."""
_END_S = 240.0
"""How long the rest of the training may take once nothing disturbs it: it needs a few seconds, and
the start of a group, `store.bound_s`."""


class _Agents:
    """The agents of the job; see `faults.Agents`."""

    def __init__(self, cluster: Cluster, backend: str) -> None:
        self._cluster = cluster
        self._backend = ["--rdzv-backend=etcd", "--rdzv-conf=last_call_timeout=5"]
        self._backend += ["--rdzv-endpoint", ",".join(f"{name}:2379" for name in members.NAMES)]
        self._backend = self._backend if backend == "etcd" else []
        self.running: dict[str, Started] = {}

    def start(self, host: str) -> None:
        # With a minimum of two, the loss of two at a time ends the job, as it must.
        options = ("--nnodes=1:3", "--replacement-timeout=1", "--max-restarts=1000")
        # A host leaves and joins at the end of a step, and so not while training waits in one.
        self.running[host] = self._cluster.agent(host, *options, *self._backend, args=STEPPING)

    def kill(self, host: str) -> None:
        agent = self.running.pop(host).process
        if agent.poll() is None:
            agent.send_signal(signal.SIGCONT)  # `nsenter` must see the end of its child
            agent.send_signal(signal.SIGKILL)
            agent.wait()

    def pause(self, host: str) -> None:
        self._signal(host, signal.SIGSTOP)

    def resume(self, host: str) -> None:
        self._signal(host, signal.SIGCONT)

    def drain(self, host: str) -> None:
        """By a command on another host, which may fail."""
        other = next((name for name in self.running if name != host), host)
        where = self._backend[:1] + self._backend[3:] if self._backend else _WHERE
        self._cluster.start(other, [*_DRAIN, host, *where])

    def join_again(self, host: str) -> None:
        if host in self.running and self.running[host].process.poll() == 0:
            self.start(host)

    def _signal(self, host: str, number: signal.Signals) -> None:
        if self.running[host].process.poll() is None:
            self.running[host].process.send_signal(number)


def try_jobs(calls: Calls | None, seed: int, until: float, most: int | None) -> Result:
    """One trial, with faults for `most` seconds."""
    return one_trial("jobs", seed, partial(_trial, seconds=most or FAULTS_S))


def try_etcd_jobs(calls: Calls | None, seed: int, until: float, most: int | None) -> Result:
    """One trial with etcd, whose three members are on hosts with faults, too."""
    return one_trial("etcd-jobs", seed, partial(_trial, seconds=most or FAULTS_S, backend="etcd"))


def _trial(
    folder: Path, r: random.Random, *, seconds: float, backend: str = "c10d"
) -> tuple[int, list[str]]:
    """One trial: the number of steps that were made, and the violations."""
    names = ["h1", "h2", "h3"]
    all_names = [*names, *(members.NAMES if backend == "etcd" else ())]
    found: list[str] = []
    with contextlib.ExitStack() as stack:
        undisturbed = stack.enter_context(_undisturbed(folder))
        network = stack.enter_context(Network(all_names))
        shaking = None
        if not shaker.why_not():
            shaking = shaker.Shaker(network, r.randrange(1 << 30))
            stack.callback(shaking.close)
        cluster = Cluster(network, folder)
        agents = _Agents(cluster, backend)
        both = members.WithMembers(network, agents, folder, backend)
        for name in names:
            agents.start(name)
        planned = plan(r, all_names, seconds, LEASE_S, (*KINDS, "drain", "drain"))
        (folder / "faults").write_text("\n".join(map(str, planned)))
        faults = Faults(network, shaking, both, r)
        try:
            cluster.until_step(5)
            faults.run(planned, seconds)
            faults.end_all(all_names)
            cluster.go()
            found += _await_end(agents)
            found += _wrong_weights(cluster, undisturbed)
            if not found:
                for name in both.etcd.names:
                    both.kill(name)
                found += _left(network)
        except AssertionError as e:
            found.append(str(e))
        segments = read_segments(cluster.trace, {h.name: h.clock_offset_s for h in network})
        found += check_segments(segments, planned)
    if not found:
        found += check_lineage(segments)
    return sum(len(s) for s in segments.values()), found


@contextlib.contextmanager
def _undisturbed(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The same training in one process and without faults; it prints the hash of the weights."""
    command = [sys.executable, str(TRAIN), "--state", str(folder / "undisturbed"), "--pause", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _await_end(agents: _Agents) -> list[str]:
    deadline = time.monotonic() + _END_S
    while any(each.process.poll() is None for each in agents.running.values()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    codes = {host: each.process.poll() for host, each in agents.running.items()}
    said = "\n".join(f"{host}: {each.output[-1500:]}" for host, each in agents.running.items())
    ended = all(code == 0 for code in codes.values())
    return [] if ended else [f"exit codes {codes}, after {_END_S} s at most:\n{said}"]


def _left(network: Network) -> list[str]:
    """Processes that still run; of one that has ended, an entry may stay until it is reaped."""
    deadline = time.monotonic() + _LINGER_S
    while True:
        running = [
            f"{host.name}: {Path(f'/proc/{pid}/cmdline').read_bytes()[:300]!r}"
            for host in network
            for pid in host.pids()
            if process_state(pid) not in ("", "Z", "X")
        ]
        if not running or time.monotonic() > deadline:
            return [f"processes are left: {running}"] if running else []
        time.sleep(0.1)


def _wrong_weights(cluster: Cluster, undisturbed: subprocess.Popen[str]) -> list[str]:
    expected = {undisturbed.communicate()[0].split()[-1]}
    said = {m[1] for p in cluster.started if (m := re.search(r"weights (\w+)", p.output))}
    return [] if said == expected else [f"weights {said}, not {expected}"]


# ------------------------------------------------------------------------ what was recorded

Segment = tuple[str, str, int]
"""A process, its host, and an iteration of it: it has one rank in one view."""


def read_segments(trace: Path, offsets: dict[str, int]) -> dict[Segment, list[dict[str, Any]]]:
    """The steps of each process in each iteration, with times of one clock."""
    found: defaultdict[Segment, list[dict[str, Any]]] = defaultdict(list)
    for file in trace.iterdir():
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                step = json.loads(line)
                step["time"] -= offsets[step["host"]]
                found[file.name, step["host"], step["iteration"]].append(step)
    return dict(found)


def check_segments(
    segments: dict[Segment, list[dict[str, Any]]], planned: list[Fault]
) -> list[str]:
    """No two views train at a time. Two segments are surely of two views if they have the same
    rank, or different iterations or sizes.

    A worker of a frozen host may finish the step whose data it had received before, in the moment
    until it is killed; that step reaches no other rank.
    """
    frozen = {host for fault in planned if fault.kind == "freeze" for host in fault.hosts}
    spans = []
    for (file, host, _), steps in segments.items():
        sure = steps[:-1] if host in frozen else steps
        if sure:
            spans.append((sure[0]["time"], sure[-1]["time"], file, sure[0]))
    found = []
    for one, other in itertools.combinations(sorted(spans, key=lambda span: span[:3]), 2):
        a, b = one[3], other[3]
        same = all(a[name] == b[name] for name in ("iteration", "size")) and a["rank"] != b["rank"]
        if not same and other[0] <= one[1]:
            found.append(
                f"two views at a time, until {one[1]:.3f} and from {other[0]:.3f}: {a}, {b}"
            )
    return found


def check_lineage(segments: dict[Segment, list[dict[str, Any]]]) -> list[str]:
    """Each step is made, and the last time after the last time of the step before it. A rank 0 that
    is ended right after a step has not recorded it; the others have, and continue after it.
    """
    last: dict[int, float] = {}
    made: set[int] = set()
    for steps in segments.values():
        for step in steps:
            made.add(step["step"])
            if step["rank"] == 0:
                last[step["step"]] = max(step["time"], last.get(step["step"], 0.0))
    missing = set(range(1, LAST_STEP + 1)) - made
    found = [f"steps that no rank has made: {sorted(missing)}"] if missing else []
    for earlier, later in itertools.pairwise(sorted(last)):
        if last[later] < last[earlier]:
            found.append(f"step {earlier} was made again, and step {later} was not")
    return found
