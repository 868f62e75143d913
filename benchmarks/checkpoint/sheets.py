"""The tables of the checkpoint benchmarks."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.checkpoint.first_save import COPY
from benchmarks.checkpoint.memory import WHAT
from benchmarks.checkpoint.saves import BESIDE
from benchmarks.checkpoint.ways import OURS
from benchmarks.inprocess.soak import slope
from benchmarks.lib.sheets import Sheet, median, ms

__all__ = ["sheets"]

_RAW_WRITES = ("raw write", "raw write, O_DIRECT")
_RAW_READS = ("raw read with checksums", "raw read with checksums, O_DIRECT")
_RESTORES = {  # and the limit that each is compared with
    "restore from memory": "memory",
    "lm-resiliency load from memory": "memory",
    "restore from disk, cold": "cold",
    "dcp.load, cold": "cold",
    "torch-checkpointing load, cold": "cold",
    "lm-resiliency load, cold": "cold",
    "restore from disk, warm": "warm",
    "dcp.load, warm": "warm",
    "torch-checkpointing load, warm": "warm",
    "lm-resiliency load, warm": "warm",
}


@dataclasses.dataclass(frozen=True)
class _Figures:
    """Medians for one process, or for the slowest of several ranks."""

    name: str
    size_bytes: int
    seconds: dict[str, dict[str, list[float]]]

    def of(self, name: str, what: str = "seconds") -> float:
        found = median(self.seconds[name][what])
        assert found is not None
        return found

    @property
    def raw_write(self) -> float:
        return min(self.of(name) for name in _RAW_WRITES)

    def limit(self, kind: str) -> float:
        """The limit that a restore is compared with."""
        if kind == "memory":
            return self.of("memcpy back")
        names = [f"{name}, {kind}" for name in _RAW_READS]
        return min(self.of(name) for name in names if name in self.seconds)


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The tables of the measured parts; `run(parts=...)` may have left some out."""
    figures = []
    if "one" in data:
        figures.append(_Figures("one process", data["one"]["size_bytes"], data["one"]["seconds"]))
    if "ranks" in data:
        ranks = data["ranks"]
        figures.append(_Figures(f"{ranks['ranks']} ranks", ranks["size_bytes"], ranks["seconds"]))
    tables = {"first": _first, "peaks": _peaks, "flat": _flat}
    return [
        _goals(data, figures),
        *(_saves(each) for each in figures),
        *(_restores(each) for each in figures),
        *(table(data[name]) for name, table in tables.items() if name in data),
    ]


def _goals(data: dict[str, Any], figures: list[_Figures]) -> Sheet:
    rows = []

    def row(what: str, value: float | None, at_most: float, *, least: bool = False) -> None:
        met = value is not None and (value >= at_most if least else value <= at_most)
        goal = f"{'at least' if least else 'at most'} {at_most:g}"
        rows.append((what, _times(value), goal, "-" if value is None else "yes" if met else "no"))

    for each in figures:
        copy = each.of("memcpy")
        blocked = each.of("ours, eager", "blocked")
        row(f"{each.name}: blocked, eager, to a memcpy", blocked / copy, 1.15)
        blocked = each.of("ours, overlapped", "blocked")
        row(f"{each.name}: blocked, overlapped, to a memcpy", blocked / copy, 0.1)
        durable = each.of("ours, eager", "durable")
        row(f"{each.name}: durable, to a raw write with fsync", durable / each.raw_write, 1.25)
        for name, kind in _RESTORES.items():
            if name.startswith("restore"):
                to = "a memcpy" if kind == "memory" else "a raw read with checksums"
                speed = each.limit(kind) / each.of(name)
                goal = 0.8 if kind == "memory" else 0.9
                row(f"{each.name}: speed of a {name}, to {to}", speed, goal, least=True)
    for name, one in data.get("peaks", {}).items():
        if name in OURS:
            row(f"peak of memory, {name}, to the state", _share(one), 1.1)
    return Sheet("Goals", ("what", "ratio", "goal", "met"), rows, "Ratios of medians of this run.")


def _saves(each: _Figures) -> Sheet:
    copy, raw = each.of("memcpy"), each.raw_write
    rows = [
        ("memcpy into warm buffers", ms(copy), "1.00", "-", "-"),
        (f"{BESIDE}: the rest", ms(each.of(BESIDE)), _times(each.of(BESIDE) / copy), "-", "-"),
        *((name, "-", "-", ms(each.of(name)), _times(each.of(name) / raw)) for name in _RAW_WRITES),
    ]
    for name, timed in each.seconds.items():
        if "blocked" in timed:
            blocked, durable = each.of(name, "blocked"), each.of(name, "durable")
            rows.append(
                (name, ms(blocked), _times(blocked / copy), ms(durable), _times(durable / raw))
            )
    passing = ms(each.of("a forward and backward pass"))
    return Sheet(
        f"A save of {_mib(each.size_bytes)}, {each.name}",
        ("way", "blocked, ms", "x memcpy", "durable, ms", "x raw write"),
        rows,
        "Blocked: until the training continues. For overlapped copies this includes the wait of "
        "the next optimizer step, and the time until durable includes the pass that overlaps with "
        f"the copy ({passing} ms by itself). torch.save is durable after an fsync.",
    )


def _first(first: dict[str, Any]) -> Sheet:
    copy = median(first[COPY]["blocked"]) or 0.0
    rows = []
    for name, timed in first.items():
        opened, blocked, durable = (
            median(timed.get(w, [])) for w in ("open", "blocked", "durable")
        )
        rows.append((name, ms(opened), ms(blocked), _times((blocked or 0.0) / copy), ms(durable)))
    return Sheet(
        "The first save of a process",
        ("way", "opening, ms", "blocked, ms", "x memcpy into new memory", "durable, ms"),
        rows,
        "Each in a new process. Opening, `Checkpointer(...)`, happens once, before the save; the "
        "restore of the row with one is not in it.",
    )


def _restores(each: _Figures) -> Sheet:
    rows = []
    for name in (n for n in each.seconds if n.startswith(("memcpy back", "raw read"))):
        rows.append((name, ms(each.of(name)), _speed(each, name), "-"))
    for name, kind in _RESTORES.items():
        if name not in each.seconds:  # not installed
            continue
        speed = _times(each.limit(kind) / each.of(name))
        rows.append((name, ms(each.of(name)), _speed(each, name), speed))
    return Sheet(
        f"A restore of {_mib(each.size_bytes)}, {each.name}",
        ("what", "ms", "GiB/s", "speed, x limit"),
        rows,
        "Cold: not in this machine's page cache. The limit is the copy, or the faster raw read. "
        "The memory of lm-resiliency is that of the training process, and ends with it. Only "
        "`restore` compares checksums.",
    )


def _peaks(peaks: dict[str, Any]) -> Sheet:
    rows = [
        (
            name,
            _mib(one["state"]),
            str(one["in_flight"]),
            _mib(one["above"]),
            _times(_share(one)),
        )
        for name, one in peaks.items()
    ]
    return Sheet(
        "Peak of memory while saving back to back",
        (
            "way",
            "state",
            "saves in flight",
            "above the training's own",
            "x state and save in flight",
        ),
        rows,
        "Proportional set size of all processes of the save: a shared page counts once.",
    )


def _flat(flat: dict[str, list[list[float]]]) -> Sheet:
    rows = []
    for who, samples in flat.items():
        early = samples[min(1, len(samples) - 1)]
        for column, what in enumerate(WHAT, start=1):
            values = (early[column], samples[-1][column], max(s[column] for s in samples))
            growth = f"{slope(samples, column) / 5:+.2f}"
            rows.append((f"{who}: {what}", *(f"{value:.0f}" for value in values), growth))
    return Sheet(
        f"{int(flat['writer'][-1][0])} saves in a row",
        ("what", "early", "at the end", "most", "growth per 200 saves"),
        rows,
        "Growth: a line through the second half.",
    )


def _share(one: dict[str, Any]) -> float:
    return float(one["above"] / one["state"] / one["in_flight"])


def _speed(each: _Figures, name: str) -> str:
    return f"{each.size_bytes / each.of(name) / 2**30:.2f}"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
