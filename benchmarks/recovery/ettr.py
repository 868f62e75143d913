"""Effective training time ratio (ETTR) of large jobs, projected from the results of the benchmarks.

ETTR is the share of the time that goes into steps that count. The failure rates are published, see
`FAILURES`; the costs of a failure and of a save are those in `benchmarks/RESULTS.md`, read when the
benchmark runs; what no benchmark measures is a parameter of `Assumptions`, and is in the table. So
this is a projection, not a measurement.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.results_page import figure
from benchmarks.lib.sheets import Sheet

__all__ = ["Assumptions", "Costs", "ettr", "run", "sheets"]

RESULTS = Path("benchmarks/RESULTS.md")

FAILURES = {1024: 7.9 * 3600, 16_384: 1.8 * 3600}
"""Mean time to failure of a job, in seconds, by accelerators: Kokolis et al., "Revisiting
Reliability in Large-Scale Machine Learning Research Clusters" (HPCA 2025, arXiv:2410.21680).
"""

FORMULA = (
    "ETTR = (M x T / (T + b) - L) / (M + R). M: mean time to failure. T: training between two "
    "saves. b: for how long a save blocks. R: from the failure to the next step. L: work that is "
    "redone, T / 2 plus the time until a save is durable, or nothing where a replica survives. To "
    "first order this is 1 - b / T - (R + L) / M. T is the best one, sqrt(2 x b x M), but saves do "
    "not overlap."
)


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What no benchmark here measures."""

    state_gib: float = 10.0
    """Of each rank. The measured times of 0.19 GiB (and, from a survivor, 1 GiB) grow with it."""
    spare_s: float = 0.0
    """Until a spare host is there, after the loss is known: for both systems."""
    groups_s: float = 0.0
    """For communicators at this size: for both systems."""
    torchrun_detects_s: float | None = None
    """Until torchrun knows of the loss of a host; `None`: as fast as outlast."""


class Costs(NamedTuple):
    """Of a system, in seconds."""

    restart: float  # from the failure to the next step
    blocked: float  # by a save
    durable: float  # from a save to the moment at which a restart may use it
    replica: bool  # whether the newest state survives a failure


def ettr(costs: Costs, mttf: float) -> tuple[float, float]:
    """The ETTR, at least 0, and the interval between saves in seconds."""
    interval = max(math.sqrt(2 * costs.blocked * mttf), costs.durable)
    redone = 0.0 if costs.replica else interval / 2 + costs.durable
    useful = mttf * interval / (interval + costs.blocked) - redone
    return max(0.0, useful / (mttf + costs.restart)), interval


def run(quick: bool) -> dict[str, Any]:
    """Projects from the results on the page. `quick` makes no difference: nothing is measured."""
    found = _measured(RESULTS.read_text())
    assumed = Assumptions()
    rows = []
    for accelerators, mttf in FAILURES.items():
        for name, costs in _systems(found, assumed, accelerators).items():
            share, interval = ettr(costs, mttf)
            rows.append(
                {"accelerators": accelerators, "mttf": mttf, "system": name, "ettr": share}
                | {"interval": interval}
                | costs._asdict()
            )
    return {"rows": rows, "measured": found, "assumed": dataclasses.asdict(assumed)}


_SAVE, _RESTORE = "A save of 769 MiB, 4 ranks", "A restore of 769 MiB, 4 ranks"
_SURVIVORS = "After a SIGKILL of one of two ranks: DDP, gloo, `outlast run` (ms)"
_SYSTEMS = "From a fault to the first useful step, and goodput; 2 ranks, gloo"
_SIMULATED = "A restart on many hosts, simulated"
_BEST_DCP = "async_save, cached stager, staged beside"
_STATE_GIB = 769 / 4 / 1024  # of a rank in `_SAVE` and `_RESTORE`


def _measured(page: str) -> dict[str, float]:
    """The figures that the projection uses, in seconds."""

    def ms(table: str, row: str, column: str) -> float:
        return figure(page, table, row, column) / 1000

    death = "The death of a host"
    steps = "failed rank steps, s"
    return {
        "a lost host is known": figure(page, death, "declared lost", "median"),
        "outlast: next step after the loss of a host": figure(page, death, "next step", "median"),
        "outlast: restart of 2,048 ranks": ms(_SIMULATED, "combined | 256", "modelled ms"),
        "outlast: restart of 16,384 ranks": ms(_SIMULATED, "combined | 2,048", "modelled ms"),
        "outlast: 1 GiB from a survivor": ms(_SURVIVORS, "1024 MiB, survivors", "restore"),
        "outlast: a save blocks": ms(_SAVE, "ours, overlapped", "blocked, ms"),
        "outlast: durable after": ms(_SAVE, "ours, overlapped", "durable, ms"),
        "outlast: a restore from disk, cold": ms(_RESTORE, "restore from disk, cold", "ms"),
        "torchrun: the failed rank steps again": figure(
            page, _SYSTEMS, "torchrun, DCP async_save", steps, last=True
        ),
        "DCP: a save blocks": ms(_SAVE, "dcp.async_save", "blocked, ms"),
        "DCP: durable after": ms(_SAVE, "dcp.async_save", "durable, ms"),
        "DCP, best settings: a save blocks": ms(_SAVE, _BEST_DCP, "blocked, ms"),
        "DCP, best settings: durable after": ms(_SAVE, _BEST_DCP, "durable, ms"),
        "DCP: a load, cold": ms(_RESTORE, "dcp.load, cold", "ms"),
    }


def _systems(found: dict[str, float], assumed: Assumptions, accelerators: int) -> dict[str, Costs]:
    grown = assumed.state_gib / _STATE_GIB
    waits = assumed.spare_s + assumed.groups_s
    # The time of a restart of the protocol is proportional to the ranks where there are many.
    least, most = (found[f"outlast: restart of {ranks} ranks"] for ranks in ("2,048", "16,384"))
    protocol = least + (most - least) * (accelerators - 2048) / (16_384 - 2048)
    ours = found["outlast: next step after the loss of a host"] + max(0.0, protocol) + waits
    blocked = grown * found["outlast: a save blocks"]
    durable = grown * found["outlast: durable after"]
    detected = assumed.torchrun_detects_s
    theirs = found["a lost host is known"] if detected is None else detected
    theirs += found["torchrun: the failed rank steps again"] + waits
    return {
        "outlast, a replica survives": Costs(
            ours + assumed.state_gib * found["outlast: 1 GiB from a survivor"],
            blocked,
            durable,
            replica=True,
        ),
        "outlast, from a checkpoint": Costs(
            ours + grown * found["outlast: a restore from disk, cold"],
            blocked,
            durable,
            replica=False,
        ),
        "torchrun, DCP async_save": Costs(
            theirs + grown * found["DCP: a load, cold"],
            grown * found["DCP: a save blocks"],
            grown * found["DCP: durable after"],
            replica=False,
        ),
        "torchrun, DCP async_save, best settings": Costs(
            theirs + grown * found["DCP: a load, cold"],
            grown * found["DCP, best settings: a save blocks"],
            grown * found["DCP, best settings: durable after"],
            replica=False,
        ),
    }


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The tables of the results: the projection and what it is made of."""
    rows = [
        (
            row["system"],
            f"{row['accelerators']:,}",
            f"{row['mttf'] / 3600:.1f}",
            f"{row['restart']:.1f}",
            f"{row['blocked']:.1f}",
            f"{row['durable']:.0f}",
            f"{row['interval'] / 60:.1f}",
            f"{row['ettr']:.1%}",
        )
        for row in data["rows"]
    ]
    inputs = [
        (name, f"{seconds:.2f} s", "RESULTS.md") for name, seconds in data["measured"].items()
    ]
    for name, value in data["assumed"].items():
        shown = "as outlast" if value is None else f"{value:g}"
        inputs.append((name, shown, "assumed"))
    return [
        Sheet(
            "ETTR, projected",
            (
                "system",
                "accelerators",
                "M, h",
                "R, s",
                "b, s",
                "durable after, s",
                "T, min",
                "ETTR",
            ),
            rows,
            f"{FORMULA} M is published (arXiv:2410.21680). R of torchrun: it starts its "
            "processes as fast at this size as two of them here; of outlast: the simulated restart "
            "in addition. Best settings: the way of DCP that blocks least.",
        ),
        Sheet(
            "What the projection is made of",
            ("figure", "value", "from"),
            inputs,
            "Measured on two cores and one disk, for small models: the times of saves and restores "
            "are those of the measured state times `state_gib` over its size.",
        ),
    ]
