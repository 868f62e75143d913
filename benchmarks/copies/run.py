"""Copies of snapshots in another host's memory, and what they are good for.

The cost to training is a ratio of adjacent segments; the times after the loss of a host are those
of the slower rank.
"""

from __future__ import annotations

from typing import Any

from benchmarks.checkpoint.training_state import QUICK, SHARE
from benchmarks.copies import host_loss, step_rate
from benchmarks.lib.sheets import Sheet, median, ms

__all__ = ["run", "sheets"]


def run(quick: bool) -> dict[str, Any]:
    """Runs both measurements."""
    size = QUICK if quick else SHARE
    return {
        "rate": step_rate.measure(size, 10 if quick else 40, 1 if quick else 5),
        "loss": host_loss.measure(size, 1 if quick else 5),
    }


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The tables."""
    return [_rate(data["rate"]), _loss(data["loss"])]


def _rate(rate: dict[str, Any]) -> Sheet:
    rates = rate["rates"]
    rows = []
    for way, found in rates.items():
        lost = [
            _lost(found, rates[other]) if way not in (other, "without saves") else "-"
            for other in ("without saves", "saves")
        ]
        rows.append((way, f"{median(found) or 0:.2f}", *lost))
    copies = median(rate["copies"]) or 0.0
    return Sheet(
        f"A training on two hosts that saves {rate['size_bytes'] / 2**20:,.0f} MiB per rank",
        ("way", "steps/s", "lost to no saves", "lost to saves without copies"),
        rows,
        f"Each segment begins with a save. Its copy was complete after {copies:.2f} s (median of "
        f"the {len(rate['copies'])} that were complete within {len(rates['saves'])} segments). "
        "Both hosts are on one machine and share its processors.",
    )


def _lost(rates: list[float], others: list[float]) -> str:
    ratio = median([one / other for one, other in zip(rates, others, strict=True)]) or 0.0
    return f"{100 * (1 - ratio):.1f} %"


def _loss(loss: dict[str, Any]) -> Sheet:
    names = {
        "copies": "outlast, from copies",
        "storage": "outlast, from storage",
        "torchrun": "torchrun, from storage",
    }
    rows = [
        (
            names[name],
            ms(median(found["seconds"])),
            ms(max(found["seconds"])),
            ms(median(found.get("restore", []))),
        )
        for name, found in loss.items()
    ]
    return Sheet(
        "From the loss of a host to the first useful step",
        ("way", "ms, median", "ms, worst", "of it the restore"),
        rows,
        "Without the time to detect the loss. The replacement has imported torch already; torchrun "
        "starts new processes. Storage is the local disk, not in the page cache: that of a cluster "
        "is slower, and shared by all ranks.",
    )
