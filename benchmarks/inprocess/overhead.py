"""The overhead of the wrapper without faults: the rate of training steps with and without it.

Both kinds of segment alternate in the same two processes, in the order A B B A, to cancel drift;
each pair gives one ratio of rates. Segments are longer than the wrapper's intervals (1 s), so they
contain its periodic work in the true proportion.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.inprocess.rest import operations_at_rest
from benchmarks.lib.faults import part
from benchmarks.lib.rank_processes import RankProcesses, free_port, wrapped
from benchmarks.lib.sheets import Sheet
from outlast import inprocess

__all__ = ["run", "sheets"]

RANKS = 2
WARM_S = 0.3
SEGMENT_S = 2.0


def run(quick: bool) -> dict[str, Any]:
    """Measures the ratios, the cost of a ping, and the store operations at rest."""
    pairs = 3 if quick else 100
    print(f"overhead: {pairs} pairs of {SEGMENT_S} s", flush=True)
    ports = [free_port() for _ in range(2 * pairs + 2)]
    with RankProcesses("overhead", RANKS) as processes:
        processes.start_all(lambda slot: _rank(pairs, slot, ports, str(processes.folder)))
        processes.wait_all(120 + pairs * 10)
        data: dict[str, Any] = json.loads((processes.folder / "rates.json").read_text())
    seconds = 3.0 if quick else 20.0
    data["rest"] = operations_at_rest(4, seconds)
    return data


def _rank(pairs: int, slot: int, ports: list[int], folder: str) -> None:
    inputs, labels = _digits()
    plain: list[float] = []
    under: list[float] = []
    pings: list[float] = []

    def with_wrapper(call: inprocess.CallWrapper) -> float:
        dist.init_process_group("gloo")
        rate = _train(inputs, labels, call.ping)
        pings.append(_ping_cost(call))
        return rate

    def without() -> float:
        dist.init_process_group("gloo")
        return _train(inputs, labels, lambda: None)

    with_it = wrapped(with_wrapper, inprocess.Wrapper())
    for number in range(2 * pairs + 2):
        os.environ["MASTER_PORT"] = str(ports[number])
        first = number // 2 % 2 == number % 2
        rate = without() if first else with_it()
        if number >= 2:  # the first pair warms up
            (plain if first else under).append(rate)
    if slot == 0:
        result = {"plain": plain, "wrapped": under, "ping": statistics.median(pings)}
        with open(os.path.join(folder, "rates.json"), "w") as file:
            json.dump(result, file)


def _train(inputs: torch.Tensor, labels: torch.Tensor, ping: Any) -> float:
    """Steps per second. All ranks stop at the same step, which rank 0 sets after the warm-up."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of = torch.nn.CrossEntropyLoss()

    def steps(count: int) -> float:
        start = time.perf_counter()
        for number in range(count):
            at = 64 * (number % (len(labels) // 64))
            optimizer.zero_grad()
            loss_of(model(inputs[at : at + 64]), labels[at : at + 64]).backward()
            optimizer.step()
            ping()
        return time.perf_counter() - start

    steps(20)
    count = torch.tensor([steps(50) / 50])
    dist.broadcast(count, 0)
    steps(max(1, int(WARM_S / count.item())))
    number = max(1, int(SEGMENT_S / count.item()))
    dist.barrier()
    seconds = steps(number)
    part()
    return number / seconds


def _ping_cost(call: inprocess.CallWrapper) -> float:
    start = time.perf_counter()
    for _ in range(2000):
        call.ping()
    return (time.perf_counter() - start) / 2000


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The handwritten digits of scikit-learn; noise of the same shape without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        generator = torch.Generator().manual_seed(0)
        return (
            torch.rand(1792, 64, generator=generator),
            torch.randint(10, (1792,), generator=generator),
        )
    digits = load_digits()
    return torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)


def lost(data: dict[str, Any]) -> tuple[float, float, float]:
    """The lost fraction of the step rate, and its 95 % interval (bootstrap over pairs).

    The mean of the middle 80 % of the ratios: a pair disturbed by another process is an outlier.
    """
    ratios = [math.log(w / p) for p, w in zip(data["plain"], data["wrapped"], strict=True)]
    source = random.Random(0)
    means = sorted(_middle(source.choices(ratios, k=len(ratios))) for _ in range(2000))
    return (
        1 - math.exp(_middle(ratios)),
        1 - math.exp(means[int(0.975 * len(means))]),
        1 - math.exp(means[int(0.025 * len(means))]),
    )


def _middle(values: list[float]) -> float:
    cut = len(values) // 10
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The tables of the results."""
    share, low, high = lost(data)
    plain = statistics.median(data["plain"])
    rows = [
        ("pairs of segments", str(len(data["plain"]))),
        ("steps/s without the wrapper (median)", f"{plain:.1f}"),
        ("steps/s with it (median)", f"{statistics.median(data['wrapped']):.1f}"),
        ("step rate lost", f"{100 * share:.2f} %"),
        ("its 95 % interval", f"{100 * low:.2f} to {100 * high:.2f} %"),
        ("one ping", f"{1e6 * data['ping']:.1f} µs"),
    ]
    rest = data["rest"]
    for who in ("main", "monitor"):
        for name, rate in sorted(rest[who].items()):
            rows.append(
                (f"store operations/s at rest, per rank: {name} ({who} process)", f"{rate:.2f}")
            )
    rows.append(("store operations/s at rest, per rank: all", f"{rest['all']:.2f}"))
    return [Sheet(f"Cost without faults: digits, DDP, gloo, {RANKS} ranks", ("", "value"), rows)]
