"""From a fault to the last survivor's entry into the function: 4 ranks, gloo, loopback.

Every timeout of outlast has its default. The peer is measured in the same run.
"""

from __future__ import annotations

from typing import Any

from benchmarks.inprocess import restart_outlast, restart_peer
from benchmarks.inprocess.phases import STEPS, medians
from benchmarks.lib.faults import KINDS, RANKS
from benchmarks.lib.sheets import Sheet, median, ms, quantile

__all__ = ["run", "sheets"]

PEER_CAP_S = 30.0
# The peer does not recover from these within the cap with any setting: the cap is the result,
# measured once.
PEER_NEVER = ("hang_subgroup", "sleep")


def run(quick: bool, kept: dict[str, Any] | None = None) -> dict[str, Any]:
    """Measures in seconds. The peer's results are those of `kept`, an earlier run, if given."""
    kinds = ["exception", "sigkill"] if quick else list(KINDS)
    faults = 3 if quick else 52
    mine: dict[str, Any] = {}
    for kind in kinds:
        print(f"restart: {kind}, {faults} faults", flush=True)
        found = restart_outlast.measure(kind, faults)
        mine[kind] = {
            "restart": found.restart,
            "rejoin": found.rejoin,
            "phases": medians(found.phases),
        }
    return {"ours": mine, "peer": kept["peer"] if kept else _peer(kinds, quick), "ranks": RANKS}


def _peer(kinds: list[str], quick: bool) -> dict[str, dict[str, list[float | None]]]:
    if not restart_peer.available():
        print("restart: nvidia-resiliency-ext is not installed; nothing to compare with")
        return {}
    results: dict[str, dict[str, list[float | None]]] = {}
    settings = restart_peer.SETTINGS[-1:] if quick else restart_peer.SETTINGS
    for setting in settings:
        results[setting.name] = {}
        for kind in kinds:
            if kind in PEER_NEVER and setting is not settings[-1]:
                continue
            # With a long gloo timeout one value is as good as five.
            faults = 1 if quick or setting.gloo_s > 5 or kind in PEER_NEVER else 5
            print(f"restart: peer, {setting.name}: {kind}, {faults} faults", flush=True)
            results[setting.name][kind] = restart_peer.measure(kind, setting, faults, PEER_CAP_S)
    return results


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The tables of the results."""
    made = [_latency(data), _phases(data)]
    if data["peer"]:
        made.insert(1, _comparison(data))
    return made


def _latency(data: dict[str, Any]) -> Sheet:
    rows = []
    for kind, found in data["ours"].items():
        values = found["restart"]
        rows.append(_row(KINDS[kind], values))
        if found["rejoin"]:
            rows.append(
                _row("(a replacement calls the function, until all are in)", found["rejoin"])
            )
    return Sheet(
        f"Restart latency in ms, {data['ranks']} ranks, gloo, all timeouts at their defaults",
        ("fault", "faults", "median", "p90", "p99", "worst"),
        rows,
        "From the fault to the last survivor's entry into the function.",
    )


def _row(name: str, values: list[float]) -> tuple[str, ...]:
    return (
        name,
        str(len(values)),
        ms(median(values)),
        ms(quantile(values, 0.9)),
        ms(quantile(values, 0.99)),
        ms(max(values)),
    )


def _comparison(data: dict[str, Any]) -> Sheet:
    rows = []
    for setting, by_kind in data["peer"].items():
        gloo_s = float(setting.split()[-2])  # as in `Setting.name`
        for kind, values in by_kind.items():
            back = [v for v in values if v is not None]
            mine = median(data["ours"][kind]["restart"]) or 0.0
            if back:
                theirs = median(back) or 0.0
                shown, best = ms(theirs), ms(min(back))
                ratio = f"{theirs / mine:,.0f} x"
                least = f"{min(back) / mine:,.0f} x"
                rest = f"{(theirs - gloo_s) / mine:,.0f} x"
            else:
                shown, best = f"> {PEER_CAP_S * 1000:,.0f}", "-"
                ratio = least = f"> {PEER_CAP_S / mine:,.0f} x"
                rest = "-"
            counted = str(len(values))
            rows.append((setting, kind, counted, shown, best, ms(mine), ratio, least, rest))
    return Sheet(
        "Beside nvidia-resiliency-ext (ms)",
        (
            *("its setting", "fault", "faults", "median", "best", "ours", "ratio", "of its best"),
            "without the gloo timeout",
        ),
        rows,
        "The same function and faults. Ratios are to the median of outlast; the last one is that "
        "of its median less the timeout of the gloo group, for which its abort waits.",
    )


def _phases(data: dict[str, Any]) -> Sheet:
    kinds = list(data["ours"])
    rows = [
        (words, *(ms(data["ours"][kind]["phases"].get(step)) for kind in kinds))
        for step, words in STEPS.items()
    ]
    return Sheet(
        "What a restart is made of (median ms until the last rank had done it)",
        ("step", *kinds),
        rows,
    )
