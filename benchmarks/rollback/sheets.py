"""The tables of the cost of faults, and of live state per step."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.lib.paired import growth
from benchmarks.lib.sheets import Sheet, ms
from benchmarks.rollback.ways import UNSAVED, WAYS

__all__ = ["sheets"]

_FAULTS = {"exception": "an exception", "sigkill": "a SIGKILL"}
_LIMITS = {
    ("exception", "live"): "copy",
    ("sigkill", "live"): "socket",
    ("exception", "memory"): "copy",
    ("sigkill", "memory"): "copy",
}
"""The physical limit of a restore; of one from disk it is a raw read, warm or cold."""
_COST = "Live state without faults: `Job` beside `Job(live=False)`, DDP, gloo, 2 ranks"
_GOALS = {("sigkill", "live"): 1.5, ("exception", "memory"): 1.25, ("sigkill", "memory"): 1.25}
"""Of a restore, in limits."""
_SHARE, _LEAST_S = 0.01, 40e-6
"""Of a step, for live state: the goal. The second is the first of 4 ms."""


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The tables of the results."""
    return [*(_fault(data, kind) for kind in _FAULTS), _cost(data["cost"]), *_mirrors(data)]


def _fault(data: dict[str, Any], kind: str) -> Sheet:
    rows = []
    for mib, found in data["faults"].items():
        for way in found:
            rows.append(_row(mib, way, kind, found, data["limits"][mib]))
    return Sheet(
        f"After {_FAULTS[kind]} of one of two ranks: DDP, gloo, `outlast run` (ms)",
        (
            "state, from",
            "faults",
            "first step",
            "first useful step",
            "x survivors",
            "steps redone",
            "restore",
            "limit",
            "goal",
            "verdict",
            "MiB moved",
            "a step",
        ),
        rows,
        "Medians, until the slower rank is done. The fault comes "
        f"{UNSAVED} steps after a checkpoint. First useful step: beyond the last one before the "
        "fault. Limit: "
        + (
            "a copy of the state by one thread"
            if kind == "exception"
            else "the state over a loopback socket; with a checkpoint in memory, a copy"
        )
        + "; from disk, a raw read with checksums by one thread. MiB moved: of the rank that had "
        "most to receive or to read. Goals of a restore: 1.5 x the limit from survivors, 1.25 x "
        "the limit from memory."
        + (" The killed rank is replaced by a standby." if kind == "sigkill" else ""),
    )


def _row(
    mib: str, way: str, kind: str, found: dict[str, Any], limits: dict[str, float]
) -> tuple[str, ...]:
    each = [one for one in found[way] if one["kind"] == kind]
    live = [one for one in found["live"] if one["kind"] == kind]

    def middle(of: list[dict[str, Any]], what: str) -> float:
        return statistics.median(float(one[what]) for one in of)

    useful: Callable[[list[dict[str, Any]]], float] = lambda of: middle(of, "useful_step")  # noqa: E731
    limit = limits[_LIMITS.get((kind, way), way)]
    return (
        f"{mib} MiB, {WAYS[way].name}",
        str(len(each)),
        ms(middle(each, "first_step")),
        ms(useful(each)),
        f"{useful(each) / useful(live):.2f}",
        f"{middle(each, 'redone'):g}",
        ms(middle(each, "restore")),
        ms(limit),
        *_verdict(middle(each, "restore"), limit, _GOALS.get((kind, way))),
        f"{middle(each, 'moved_bytes') / 2**20:,.1f}",
        ms(middle(each, "step")),
    )


def _verdict(taken: float, limit: float, goal: float | None) -> tuple[str, str]:
    if goal is None:
        return "-", "-"
    return ms(goal * limit), "met" if taken <= goal * limit else f"{taken / goal / limit:.1f} x"


def _mirrors(data: dict[str, Any]) -> list[Sheet]:
    if "mirrors" not in data:
        return []
    title = "Live state mirrored on another host, beside live state without, DDP, gloo, 2 ranks"
    return [_cost(data["mirrors"], title)]


def _cost(data: dict[str, Any], title: str = _COST) -> Sheet:
    rows = []
    for name, found in data.items():
        plain, live = found["plain"], found["live"]
        taken, used = (growth([e[i] for e in plain], [e[i] for e in live]) for i in (0, 1))
        more = statistics.median((b[1] - a[1]) / 2 for a, b in zip(plain, live, strict=True))
        goal = max(_LEAST_S, _SHARE * statistics.median(e[0] for e in plain))
        rows.append(
            (
                f"{name}: {found['size_bytes'] / 2**20:.1f} MiB of state",
                str(len(plain)),
                f"{1e3 * statistics.median(e[0] for e in plain):.2f}",
                str(taken),
                str(used),
                f"{1e6 * more:.0f}",
                f"{1e6 * goal:.0f}",
                "met" if more <= goal else f"{more / goal:.1f} x",
                f"{1e6 * found['counters']:.0f}",
            )
        )
    return Sheet(
        title,
        (
            "model",
            "pairs",
            "a step, ms",
            "longer by (95 %)",
            "more processor time (95 %)",
            "more per rank, µs",
            "goal, µs",
            "verdict",
            "limit, µs",
        ),
        rows,
        "Segments alternate in the same processes. Processor time: all threads of both ranks. "
        f"Goal: {_SHARE:.0%} of a step, at least {1e6 * _LEAST_S:.0f} µs. Limit: one pass "
        "in Python over what torch counts of each tensor, in the same training.",
    )
