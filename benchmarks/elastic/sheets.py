"""The tables of the elastic benchmarks."""

from __future__ import annotations

from typing import Any

from benchmarks.elastic.consistent import BATCH
from benchmarks.lib.sheets import Sheet, median, ms, quantile

__all__ = ["sheets"]


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The tables of the results."""
    return [
        _position(data["position"]),
        _loader(data["loader"]),
        # Older stored results lack these measurements.
        *([_skipping(data["skipping"])] if "skipping" in data else []),
        _state(data["state"]),
        *([_registry(data["registry"])] if "registry" in data else []),
        _resharding(data["resharding"]),
        _consistent(data["consistent"]),
    ]


def _of(values: list[float]) -> float:
    found = median(values)
    assert found is not None
    return found


def _times(value: float) -> str:
    return f"{value:.2f}"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"


def _position(found: dict[str, Any]) -> Sheet:
    ours, stored = found["seconds"], found["stored_seconds"]
    rows = [
        (
            "ElasticSampler",
            ms(_of(ours)),
            ms(quantile(ours, 0.99)),
            _mib(found["grown_bytes"]),
        ),
        ("torch.randperm", ms(_of(stored)), ms(max(stored)), _mib(found["stored_bytes"])),
    ]
    return Sheet(
        f"A position in {found['length']:,} samples",
        ("order", "first batch after a restore, ms", "p99, ms", "memory"),
        rows,
        "In the middle of a shuffled epoch, 4,096 samples a batch, 8 replicas. Memory: the growth "
        "of the process's peak.",
    )


def _loader(found: dict[str, Any]) -> Sheet:
    seconds = found["seconds"]
    rows = []
    for name, values in seconds.items():
        way, _, workers = name.rpartition(", ")
        base = _of(seconds[f"DataLoader, {workers}"])
        rows.append(
            (
                f"{way}, {workers}",
                f"{_of(values) * 1e6:,.0f}",
                f"{(_of(values) - base) * 1e6:+,.0f}",
                _times(_of(values) / base),
            )
        )
    return Sheet(
        f"The loader, {found['batch']} samples a batch",
        ("way", "µs a batch", "more, µs", "x DataLoader"),
        rows,
        "Samples of 12 KiB in memory, so that only the loader takes time; with 4 parts, a batch "
        "takes four calls of the collate function.",
    )


def _skipping(found: dict[str, Any]) -> Sheet:
    rows = [
        (way, ms(_of(values)), f"{_of(values) / found['batches'] * 1e6:,.1f}")
        for way, values in found["seconds"].items()
    ]
    return Sheet(
        f"A restore after {found['batches']:,} batches of an epoch",
        ("loader", "first batch, ms", "µs for each batch that is done"),
        rows,
        f"{found['batch']} samples of 12 KiB in a batch, in memory. An `IterableDataset` is read "
        "again from the beginning: that takes what its samples take to load.",
    )


_GOALS = {  # at most so many times as long as torch's
    "Job.restore, from disk": 1.3,
    "save_all_states": 1.0,
    "load_all_states": 1.3,
}


def _beside(seconds: dict[str, Any], pairs: tuple[tuple[str, str], ...]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, base in pairs:
        times, goal = _of(seconds[name]) / _of(seconds[base]), _GOALS.get(name)
        verdict = "-" if goal is None else "met" if times <= goal else "missed"
        at_most = "-" if goal is None else f"{goal:g}"
        rows.append((name, ms(_of(seconds[name])), _times(times), at_most, verdict))
    return rows


def _state(found: dict[str, Any]) -> Sheet:
    pairs = (
        ("torch.save", "torch.save"),
        ("Job.save", "torch.save"),
        ("torch.save, durable", "torch.save, durable"),
        ("Job.save, durable", "torch.save, durable"),
        ("torch.load", "torch.load"),
        ("Job.restore, from disk", "torch.load"),
        ("Job.restore, from memory", "torch.load"),
    )
    return Sheet(
        f"A job's state of {_mib(found['size_bytes'])}",
        ("what", "ms", "x torch's", "goal", "verdict"),
        _beside(found["seconds"], pairs),
        "The same content, loaded into the model, the optimizer and the sampler. `Job.save` blocks "
        "the training for the first time only; checksums and commit are included in the second. A "
        "restore verifies every byte. Both read from the page cache.",
    )


def _registry(found: dict[str, Any]) -> Sheet:
    pairs = (
        ("torch.save", "torch.save"),
        ("save_all_states, asynchronous", "torch.save"),
        ("torch.save, durable", "torch.save, durable"),
        ("save_all_states", "torch.save, durable"),
        ("save_all_states, asynchronous, durable", "torch.save, durable"),
        ("torch.load", "torch.load"),
        ("load_all_states", "torch.load"),
        ("load_state of each, the checkpoint chosen before", "torch.load"),
    )
    return Sheet(
        f"The registry of states, {_mib(found['size_bytes'])}",
        ("what", "ms", "x torch's", "goal", "verdict"),
        _beside(found["seconds"], pairs),
        "The same content as states. `save_all_states` returns when the checkpoint is durable "
        "and committed; the asynchronous one when it is in memory. "
        "`load_all_states` reads the whole newest checkpoint to choose it, and reads and verifies "
        "again what it loads. Both read from the page cache.",
    )


def _resharding(found: list[dict[str, Any]]) -> Sheet:
    rows = []
    for each in found:
        ours = _of(each["seconds"]["Checkpointer.restore"])
        theirs = _of(each["seconds"]["dcp.load"])
        rows.append(
            (
                f"{each['before']} to {each['after']} ranks, {_mib(each['size_bytes'])}",
                ms(ours),
                ms(theirs),
                _times(ours / theirs),
            )
        )
    return Sheet(
        "Resharding",
        ("what", "Checkpointer.restore, ms", "dcp.load, ms", "x dcp.load"),
        rows,
        "The slowest rank. `Checkpointer` verifies every byte, torch.distributed.checkpoint none.",
    )


def _consistent(found: dict[str, Any]) -> Sheet:
    rows = []
    for run in found["runs"]:
        seconds = run["seconds"]
        base = _of(seconds["DDP"])
        rows.append((f"{run['ranks']} ranks: DDP", ms(base), "1.00", "-"))
        for count in found["virtual"]:
            parts = _of(seconds[f"DDP, {count} parts"])
            ours = _of(seconds[f"ConsistentDDP, {count} parts"])
            rows.append(
                (f"{run['ranks']} ranks: DDP, {count} parts", ms(parts), _times(parts / base), "-")
            )
            rows.append(
                (
                    f"{run['ranks']} ranks: ConsistentDDP, {count} parts",
                    ms(ours),
                    _times(ours / base),
                    _times(ours / parts),
                )
            )
    size = _mib(found["runs"][0]["gradient_bytes"])
    return Sheet(
        f"Bit-identical at any size: a global batch of {BATCH}, gradients of {size}",
        ("way", "ms a step", "x DDP", "x DDP in as many parts"),
        rows,
        "A transformer with dropout, one thread per rank, gloo, all ranks on one machine. DDP in "
        "parts accumulates the gradients of as many parts as `ConsistentDDP` has.",
    )
