"""The cost of the checks for silent faults, and their false alarms over a run without faults.

Steps are measured with and without the checks in the same two processes, alternately, in the order
A B B A, to cancel drift; each pair gives one ratio. A segment is one cycle of the replica check, so
that it has the check's work in the true proportion. Beside the step rate there is the processor
time of a step, all threads of the process together: another process on the machine changes it less.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import xxhash
from torch.nn.parallel import DistributedDataParallel

from benchmarks.inprocess.overhead import lost
from benchmarks.lib.rank_processes import RankProcesses, free_port
from benchmarks.lib.sheets import Sheet
from outlast.elastic import ReplicaCheck, StragglerCheck
from outlast.events import MemorySink

__all__ = ["run", "sheets"]

RANKS = 2
WIDTH, LAYERS, BATCH = 512, 4, 256
EVERY = 100

_Cost: TypeAlias = tuple[float, float]
CLEAN_STEPS = 2000


def run(quick: bool) -> dict[str, Any]:
    """Measures the ratios of step rates, the speed of hashing, and counts false alarms."""
    pairs, every = (2, 10) if quick else (10, EVERY)
    clean = 100 if quick else CLEAN_STEPS
    print(f"silent: {pairs} pairs of {every} steps, then {clean} steps", flush=True)
    port = free_port()
    with RankProcesses("silent", RANKS) as processes:
        processes.start_all(lambda slot: _rank(slot, pairs, every, clean, port, processes.folder))
        processes.wait_all(600)
        data: dict[str, Any] = json.loads((processes.folder / "rates.json").read_text())
    return data


def _rank(slot: int, pairs: int, every: int, clean: int, port: int, folder: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=slot, world_size=RANKS)
    plain: list[_Cost] = []
    checked: list[_Cost] = []
    sink = MemorySink()
    training = _Training(WIDTH, LAYERS, BATCH)
    training.steps(5)
    for number in range(2 * pairs + 2):
        first = number // 2 % 2 == number % 2
        cost = training.steps(every) if first else training.checked(every, every, sink)
        if number >= 2:  # the first pair warms up
            (plain if first else checked).append(cost)
    small = _Training(64, 2, 16)  # short steps: as many judgments as possible
    small.checked(clean, 10, sink)
    if slot == 0:
        size = sum(p.nbytes for p in training.model.parameters())
        result = {
            "rates": _ratios(plain, checked, 0),
            "processor": _ratios(plain, checked, 1),
            "every": every,
            "size_bytes": size,
            "hash_rate": _hash_rate(),
            "clean_steps": clean,
            "alarms": sorted(event.kind for event in sink.events),
        }
        (folder / "rates.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def _ratios(plain: list[_Cost], checked: list[_Cost], which: int) -> dict[str, list[float]]:
    return {"plain": [each[which] for each in plain], "wrapped": [each[which] for each in checked]}


class _Training:
    """A training of equal layers."""

    def __init__(self, width: int, layers: int, batch: int) -> None:
        torch.manual_seed(0)
        each = [torch.nn.Linear(width, width) for _ in range(layers)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*each))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        self.inputs = torch.randn(batch, width)

    def steps(self, count: int, checks: Any = ()) -> _Cost:
        """Trains; returns the steps per second, and per second of processor time."""
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(self.inputs).square().mean().backward()
            self.optimizer.step()
            for check in checks:
                check.step()
        return count / (time.perf_counter() - start), count / (time.process_time() - used)

    def checked(self, count: int, every: int, sink: MemorySink) -> _Cost:
        """The same with both checks."""
        replicas = ReplicaCheck(every=every).start(self.model, events=sink, step=-1)
        stragglers = StragglerCheck().start(self.model, events=sink)
        with replicas, stragglers:
            return self.steps(count, (replicas, stragglers))


def _hash_rate() -> float:
    """Bytes hashed per second, by one thread."""
    content = os.urandom(256 << 20)  # larger than the caches
    start = time.process_time()
    xxhash.xxh3_64_digest(content)
    return len(content) / (time.process_time() - start)


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The tables of the results."""
    share, low, high = lost(data["rates"])
    cpu, cpu_low, cpu_high = lost(data["processor"])
    rates = data["rates"]
    alarms = ", ".join(data["alarms"]) or "none"
    rows = [
        ("parameters", f"{data['size_bytes'] / 2**20:.0f} MiB"),
        ("steps of a cycle (`every`)", str(data["every"])),
        ("pairs of segments", str(len(rates["plain"]))),
        ("steps/s without the checks (median)", f"{statistics.median(rates['plain']):.2f}"),
        ("steps/s with both (median)", f"{statistics.median(rates['wrapped']):.2f}"),
        ("step rate lost", f"{100 * share:.2f} %"),
        ("its 95 % interval", f"{100 * low:.2f} to {100 * high:.2f} %"),
        ("more processor time per step", f"{100 * cpu:.2f} %"),
        ("its 95 % interval", f"{100 * cpu_low:.2f} to {100 * cpu_high:.2f} %"),
        ("hashing, one thread", f"{data['hash_rate'] / 1e9:.1f} GB/s"),
        (f"false alarms in {data['clean_steps']} steps", alarms),
    ]
    return [Sheet(f"Silent faults: DDP, gloo, {RANKS} ranks", ("", "value"), rows)]
