"""The cost of the checks for silent faults, and their false alarms over a run without faults.

Segments of ten steps with and without calls of the checks alternate in the same two processes, in
the order A B B A, to cancel drift. The checks are at their default intervals: ten segments with
them make one cycle of the replica check, so that it has its work in the true proportion. Each is
compared with the ten segments between its own, and gives one ratio. Beside the time of a step there
is its processor time, of all threads of both ranks: it includes the background threads, which an
idle core would hide, and another process on the machine changes it less.

`FiniteCheck`, which a `Job` has by default, is measured alone in the same way; it is started anew
for each segment, outside the measured time, so that its hooks are absent from the others.

What the checks add to a step depends little on what the step does, so that it is given in
microseconds, too, with the shortest step of which it is 0.5 %.
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

from benchmarks.lib.paired import growth
from benchmarks.lib.rank_processes import RankProcesses, free_port
from benchmarks.lib.sheets import Sheet
from outlast.elastic import FiniteCheck, ReplicaCheck, StragglerCheck
from outlast.events.emitter import MemorySink

__all__ = ["run", "sheets"]

RANKS = 2
WIDTH, LAYERS, BATCH = 512, 4, 256
EVERY = ReplicaCheck().every
CLEAN_STEPS = 2000
GOAL = 0.005
SEGMENT = 10
_MEASURING_S = 300.0
_FINITE_S = 120.0
_LEAST_CYCLES = 2
_NET_S = 900.0

_Cost: TypeAlias = tuple[float, float]
"""Of one step: its time, and its processor time of both ranks together."""


def run(quick: bool) -> dict[str, Any]:
    """Measures the cost of a step, the speed of hashing, and counts false alarms."""
    seconds, every = (0.0, 2 * SEGMENT) if quick else (_MEASURING_S, EVERY)
    finite_s = 0.0 if quick else _FINITE_S
    clean = 100 if quick else CLEAN_STEPS
    print(f"silent: cycles of {every} steps for {seconds:g} s, then {clean} steps", flush=True)
    port = free_port()
    with RankProcesses("silent", RANKS) as processes:
        processes.start_all(
            lambda slot: _rank(slot, seconds, finite_s, every, clean, port, processes.folder)
        )
        processes.wait_all(_NET_S)
        data: dict[str, Any] = json.loads((processes.folder / "costs.json").read_text())
    return data


def _rank(
    slot: int, seconds: float, finite_s: float, every: int, clean: int, port: int, folder: Any
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=slot, world_size=RANKS)
    sink = MemorySink()
    training = _Training(WIDTH, LAYERS, BATCH)
    plain: list[_Cost] = []
    checked: list[_Cost] = []
    replicas = ReplicaCheck(every=every).start(training.model, events=sink, step=-1)
    stragglers = StragglerCheck().start(training.model, events=sink)
    with replicas, stragglers:
        training.cycle(every, (replicas, stragglers))  # warms up
        end = time.monotonic() + seconds
        while _largest(float(len(plain) < _LEAST_CYCLES or time.monotonic() < end)):
            without, under = training.cycle(every, (replicas, stragglers))
            plain.append(without)
            checked.append(under)
    finite: list[tuple[_Cost, _Cost]] = []
    end = time.monotonic() + finite_s
    while _largest(float(len(finite) < _LEAST_CYCLES or time.monotonic() < end)):
        finite.append(training.finite_cycle(every))
    size_bytes = sum(p.nbytes for p in training.model.parameters())
    small = _Training(64, 2, 16)  # short steps: as many judgments as possible
    with (
        ReplicaCheck(every=10).start(small.model, events=sink, step=-1) as replicas,
        StragglerCheck().start(small.model, events=sink) as stragglers,
        FiniteCheck().start(small.model, events=sink) as whole,
    ):
        small.steps(clean, (replicas, stragglers, whole))
    if slot == 0:
        result = {
            "plain": plain,
            "checked": checked,
            "finite": finite,
            "every": every,
            "size_bytes": size_bytes,
            "hash_rate": _hash_rate(),
            "clean_steps": clean,
            "alarms": sorted(event.kind for event in sink.events),
        }
        (folder / "costs.json").write_text(json.dumps(result))
    dist.destroy_process_group()


class _Training:
    """A training of equal layers."""

    def __init__(self, width: int, layers: int, batch: int) -> None:
        torch.manual_seed(0)
        each = [torch.nn.Linear(width, width) for _ in range(layers)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*each))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        self.inputs = torch.randn(batch, width)

    def cycle(self, every: int, checks: Any) -> tuple[_Cost, _Cost]:
        """The cost of `every` steps without and with the checks, in alternating segments."""
        found: dict[bool, list[_Cost]] = {False: [], True: []}
        for number in range(every // SEGMENT):
            for with_checks in (False, True) if number % 2 == 0 else (True, False):
                found[with_checks].append(self.steps(SEGMENT, checks if with_checks else ()))
        return _mean(found[False]), _mean(found[True])

    def finite_cycle(self, every: int) -> tuple[_Cost, _Cost]:
        """The same for a `FiniteCheck` alone."""
        found: dict[bool, list[_Cost]] = {False: [], True: []}
        for number in range(every // SEGMENT):
            for with_check in (False, True) if number % 2 == 0 else (True, False):
                if with_check:
                    with FiniteCheck().start(self.model) as check:
                        found[True].append(self.steps(SEGMENT, (check,)))
                else:
                    found[False].append(self.steps(SEGMENT))
        return _mean(found[False]), _mean(found[True])

    def steps(self, count: int, checks: Any = ()) -> _Cost:
        """Trains; returns the cost of a step, of the slower rank."""
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(self.inputs).square().mean().backward()
            self.optimizer.step()
            for check in checks:
                check.step()
        taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        processor = torch.tensor([time.process_time() - used], dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        dist.all_reduce(processor)
        return taken.item() / count, processor.item() / count


def _mean(costs: list[_Cost]) -> _Cost:
    return statistics.fmean(c[0] for c in costs), statistics.fmean(c[1] for c in costs)


def _largest(value: float) -> float:
    """The largest `value` of all ranks, so that all take the same decision."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def _hash_rate() -> float:
    """Bytes hashed per second, by one thread."""
    content = os.urandom(256 << 20)  # larger than the caches
    start = time.process_time()
    xxhash.xxh3_64_digest(content)
    return len(content) / (time.process_time() - start)


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The tables of the results."""
    taken, processor = (
        growth([each[which] for each in data["plain"]], [each[which] for each in data["checked"]])
        for which in (0, 1)
    )
    step = statistics.median(each[0] for each in data["plain"])
    used = statistics.median(each[1] for each in data["plain"])
    alone = growth([plain[1] for plain, _ in data["finite"]], [it[1] for _, it in data["finite"]])
    alone_used = statistics.median(plain[1] for plain, _ in data["finite"])
    rows = [
        ("parameters", f"{data['size_bytes'] / 2**20:.0f} MiB"),
        ("steps of a cycle (`every`)", str(data["every"])),
        ("cycles compared", str(len(data["plain"]))),
        ("a step without the checks (median)", f"{1e3 * step:.2f} ms"),
        ("a step takes longer by (95 % interval)", str(taken)),
        ("processor time of a step, both ranks (median)", f"{1e3 * used:.2f} ms"),
        ("it grows by (95 % interval)", str(processor)),
        ("the same per rank", f"{1e6 * processor.value * used / RANKS:.0f} µs"),
        (
            f"step of which that is {GOAL:.1%}",
            f"{1e3 * max(processor.value, 0) * used / RANKS / GOAL:.1f} ms",
        ),
        (
            "`FiniteCheck` alone, per rank (95 % interval)",
            f"{1e6 * alone.value * alone_used / RANKS:.0f} µs ({alone})",
        ),
        ("hashing, one thread", f"{data['hash_rate'] / 1e9:.1f} GB/s"),
        (f"false alarms in {data['clean_steps']} steps", ", ".join(data["alarms"]) or "none"),
    ]
    title = f"Silent faults: both checks, DDP, gloo, {RANKS} ranks"
    return [Sheet(title, ("", "value"), rows)]
