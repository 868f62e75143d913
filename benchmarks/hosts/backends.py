"""A restart on three hosts with etcd, beside the same restart with the hosts' own store.

Hosts are network namespaces; etcd has a member on each. Two jobs alternate, one with each store: a
rank raises, or is killed, and the time counts until the last rank has made a step again. Needs
root, or user namespaces, and etcd.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.lib.sheets import Sheet, median, ms

__all__ = ["run", "sheets"]

_EXAMPLE = Path(__file__).parents[2] / "examples" / "hosts"
_NAMES = ("h1", "h2", "h3")
_LIMIT_S, _SETTLE_S, _IDLE_S = 120.0, 1.0, 4.0
_GOAL, _GOAL_REQUESTS = 1.3, 10
RANKS = 2
"""On each host."""
_BACKENDS = {"own store": "c10d", "etcd": "etcd"}
_FAULTS = {"raise 3": 6, "kill 0": 2, "kill 3": 2}
"""What happens to which rank, and how often in a turn."""
_TURNS = 3

SCRIPT = """
import json, os, signal, time
from pathlib import Path
import torch
import torch.distributed as dist
from outlast import inprocess

FOLDER = Path(__file__).parent

@inprocess.Wrapper(repeated_faults=None)
def train(call=None):
    def note(what):
        line = {"host": os.uname().nodename, "time": time.monotonic()}
        line |= {"what": what, "iteration": call.iteration, "rank": rank}
        with (FOLDER / f"trace-{os.uname().nodename}-{os.getpid()}").open("a") as file:
            file.write(json.dumps(line) + "\\n")

    rank = int(os.environ["RANK"])
    note("entered")
    dist.init_process_group("gloo")
    rank, value = dist.get_rank(), torch.ones(1)
    order = FOLDER / f"fault-{call.iteration}"
    dist.all_reduce(value)
    note("stepped")
    while not (FOLDER / "stop").exists():
        call.ping()
        if order.exists() and order.read_text().endswith(f" {rank}"):
            note("fault")
            if order.read_text().startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("planned")
        time.sleep(0.01)
    dist.destroy_process_group()

torch.set_num_threads(1)
train()
"""

_METRICS = """
import sys, urllib.request
sys.stdout.buffer.write(urllib.request.urlopen("http://127.0.0.1:2379/metrics").read())
"""
_COUNTED = re.compile(
    r'^(?:grpc_server_handled_total\{.*grpc_method="(Range|Txn|Put)".*\}'
    r"|(etcd_debugging_mvcc_events_total|process_cpu_seconds_total)) (\S+)$",
    re.MULTILINE,
)


class _Job:
    """A job with one of the stores, on hosts of its own."""

    def __init__(self, network: Any, folder: Path, etcd: Any | None) -> None:
        self.network, self.folder, self._etcd = network, folder, etcd
        self.iteration = 0
        script = folder / "train.py"
        script.write_text(SCRIPT)
        backend = "c10d" if etcd is None else "etcd"
        endpoints = ",".join(f"{h}:29400" for h in _NAMES) if etcd is None else etcd.endpoints
        for host in _NAMES:
            temporary = folder / f"tmp-{host}"
            temporary.mkdir()
            command = [sys.executable, "-m", "outlast.launch", "run", "--nnodes=3"]
            command += [f"--nproc-per-node={RANKS}", "--rdzv-id=bench", "--max-restarts=1000"]
            command += ["--standby=1", "--backoff=0", f"--events-dir={folder}/events"]
            command += [f"--rdzv-backend={backend}", f"--rdzv-endpoint={endpoints}"]
            if etcd is None:
                command += [f"--rdzv-conf=record_dir={folder}/records"]
            environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
            environment.pop("RES_OPTIONS", None)  # names are resolved as users' hosts do
            with (folder / f"{host}.log").open("wb") as out:
                network[host].start([*command, str(script)], environment, stdout=out, stderr=out)
        self._await_steps()

    def restart(self, fault: str) -> dict[str, Any]:
        """One fault; the seconds until the last rank has entered again, and has made a step."""
        if fault.startswith("kill"):
            self._await_standbys()
        time.sleep(_SETTLE_S)
        began, before = time.monotonic(), self.counts()
        (self.folder / f"fault-{self.iteration}").write_text(fault)
        self.iteration += 1
        self._await_steps()
        lines = self._lines()
        at = next(
            x["time"]
            for x in lines
            if x["what"] == "fault" and x["iteration"] == self.iteration - 1
        )
        found: dict[str, Any] = {
            what: max(
                x["time"] for x in lines if x["what"] == what and x["iteration"] == self.iteration
            )
            - at
            for what in ("entered", "stepped")
        }
        time.sleep(_SETTLE_S)
        found["seconds"] = time.monotonic() - began  # between the counts, which take a while each
        found["counts"] = {name: n - before.get(name, 0) for name, n in self.counts().items()}
        return found

    def idle(self) -> dict[str, float]:
        """What etcd counts in a second without a fault."""
        time.sleep(_SETTLE_S)
        began, before = time.monotonic(), self.counts()
        time.sleep(_IDLE_S)
        seconds, after = time.monotonic() - began, self.counts()
        return {name: (n - before.get(name, 0)) / seconds for name, n in after.items()}

    def counts(self) -> dict[str, float]:
        """What all members of etcd have counted: requests by kind, events of watches, and seconds
        of processor time.
        """
        found: dict[str, float] = {}
        for host in _NAMES if self._etcd is not None else ():
            asked = self.network[host].start(
                [sys.executable, "-S", "-c", _METRICS], stdout=subprocess.PIPE
            )
            with asked.stdout:
                text = asked.stdout.read().decode()
            asked.wait()
            for method, other, number in _COUNTED.findall(text):
                name = method or ("events" if other.endswith("events_total") else "processor")
                found[name] = found.get(name, 0.0) + float(number)
        return found

    def close(self) -> None:
        (self.folder / "stop").touch()

    def _await_steps(self) -> None:
        self._until(
            lambda: (
                len(
                    [
                        x
                        for x in self._lines()
                        if x["what"] == "stepped" and x["iteration"] == self.iteration
                    ]
                )
                == RANKS * len(_NAMES)
            ),
            f"all ranks in iteration {self.iteration}",
        )

    def _await_standbys(self) -> None:
        def ready(host: str) -> bool:
            text = (self.folder / f"{host}.log").read_text()
            return text.count("is ready") > text.count(" is now pid ")

        self._until(lambda: all(map(ready, _NAMES)), "standby processes")

    def _lines(self) -> list[dict[str, Any]]:
        found = []
        for file in self.folder.glob("trace-*"):
            for line in file.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    record = json.loads(line)
                    record["time"] -= self.network[record["host"]].clock_offset_s
                    found.append(record)
        return found

    def _until(self, happened: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not happened():
            if time.monotonic() > deadline:
                logs = [(self.folder / f"{host}.log").read_text()[-2000:] for host in _NAMES]
                raise TimeoutError("\n".join([f"waited in vain for {what}", *logs]))
            time.sleep(0.05)


@contextlib.contextmanager
def _job(backend: str) -> Iterator[_Job]:
    network_of = importlib.import_module("network").Network
    etcd_of = importlib.import_module("etcd").Etcd

    with tempfile.TemporaryDirectory() as name, network_of(_NAMES) as network:
        folder, etcd = Path(name), None
        if backend == "etcd":
            etcd = etcd_of(network, _NAMES, folder / "etcd")
            etcd.start_all()
        job = _Job(network, folder, etcd)
        yield job
        job.close()


def run(quick: bool) -> dict[str, Any]:
    """Measures restarts with both stores, in turns."""
    sys.path.insert(0, str(_EXAMPLE))
    unavailable = importlib.import_module("network").unavailable

    if reason := unavailable():
        sys.exit(f"no hosts can be made: {reason}")
    restarts = []
    idle: dict[str, float] = {}
    for _ in range(1 if quick else _TURNS):
        for name, backend in _BACKENDS.items():
            with _job(backend) as job:
                if backend == "etcd":
                    idle = job.idle()
                for fault, number in _FAULTS.items():
                    for _ in range(1 if quick else number):
                        found = {"store": name, "fault": fault} | job.restart(fault)
                        restarts.append(found)
                        shown = f"{found['entered']:.3f} s, {found['stepped']:.3f} s"
                        print(f"backends: {name}, {fault}: {shown}", flush=True)
    return {"restarts": restarts, "idle": idle}


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The latencies with their ratios, and what a restart asks of etcd."""

    def of(store: str, fault: str) -> list[dict[str, Any]]:
        return [r for r in data["restarts"] if (r["store"], r["fault"]) == (store, fault)]

    rows, counted = [], []
    for fault in _FAULTS:
        for what in ("entered", "stepped"):
            own, etcd = (median([r[what] for r in of(name, fault)]) or 0.0 for name in _BACKENDS)
            verdict = "met" if etcd <= _GOAL * own else "missed"
            ratio = f"{etcd / own:.2f}", f"{_GOAL}", verdict
            rows.append((f"{fault}: {what}", ms(own), ms(etcd), *ratio))
        each = {
            name: median([_per_host(data, r, name) for r in of("etcd", fault)]) or 0.0
            for name in ("Range", "Txn", "events")
        }
        processor = len(_NAMES) * (
            median([_per_host(data, r, "processor") for r in of("etcd", fault)]) or 0.0
        )
        # Below 0: an event saves the check of a watch that has been silent for 2 s.
        requests = max(0.0, each["Range"]) + each["Txn"]
        figures = [*each.values(), requests]
        verdict = "met" if requests <= _GOAL_REQUESTS else "missed"
        figures_of = (*(f"{n:.1f}" for n in figures), f"{_GOAL_REQUESTS}", verdict)
        counted.append((fault, *figures_of, ms(processor)))
    return [
        Sheet(
            "A restart on three hosts, with each store",
            ("until all ranks have", "own store, ms", "etcd, ms", "ratio", "goal", "verdict"),
            rows,
            f"Medians; {len(_NAMES)} hosts with {RANKS} ranks each, a standby on each, and a "
            "member of etcd on each, whose data are on a disk. Names are resolved as on a host "
            "whose resolver drops queries, as it is in these namespaces.",
        ),
        Sheet(
            "Requests to etcd of one host in one restart",
            (
                *("fault", "reads", "transactions", "events", "requests", "goal", "verdict"),
                "processor time of all members, ms",
            ),
            counted,
            "By the metrics of all members, less what they count without a fault in the same "
            "time. A transaction that writes nothing counts as one. The members share this "
            "machine's processors with the ranks.",
        ),
    ]


def _per_host(data: dict[str, Any], restart: dict[str, Any], name: str) -> float:
    idle = data["idle"].get(name, 0.0) * restart["seconds"]
    return float(restart["counts"].get(name, 0.0) - idle) / len(_NAMES)
