"""Writes the tables of results between the two markers of a page."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.sheets import to_markdown

__all__ = ["MODULES", "load", "write_docs"]

_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"


class Benchmark(NamedTuple):
    """Where a benchmark is, the title of its section on the page, and a sentence of method."""

    module: str
    title: str
    method: str


MODULES = {
    "limits": Benchmark(
        "limits.run",
        "At the limit",
        "Each cost of a fault, a step and a save beside what the hardware takes in the same run.",
    ),
    "restart": Benchmark(
        "inprocess.restart",
        "Restart latency",
        "From a fault, stamped by the failing rank, to the last survivor's entry into the "
        "function: four ranks on one host, gloo, a collective in flight, every timeout at its "
        "default; the survivors of a kill do not wait for the replacement.",
    ),
    "replacement": Benchmark(
        "inprocess.replacement",
        "Replacement of a killed rank",
        "From the end of a process under `outlast run` to the last of four ranks' entry.",
    ),
    "hang": Benchmark(
        "inprocess.hang",
        "Hangs",
        "From the moment at which a rank stops to that at which another one knows, and the "
        "restart after it.",
    ),
    "overhead": Benchmark(
        "inprocess.overhead",
        "Cost without faults",
        "Segments with and without the wrapper alternate in the same processes.",
    ),
    "scale": Benchmark(
        "inprocess.scale",
        "Scale",
        "The real state machine of up to 512 members against one real store.",
    ),
    "journeys": Benchmark(
        "inprocess.journeys",
        "Journeys",
        "Calls of a function from one module of this package into another one, in the main process "
        "of a rank, by a profiler: no figure of speed.",
    ),
    "hosts": Benchmark(
        "hosts.scale",
        "Many hosts",
        "The real recovery protocol, combining and table of up to 2,048 hosts in a simulation "
        "with modelled latencies and the leader's measured CPU time; without the work of the "
        "ranks themselves, and without lost messages.",
    ),
    "death": Benchmark(
        "hosts.death",
        "The death of a host",
        "Real hosts in network namespaces, each of which dies in turn, the leader too.",
    ),
    "moves": Benchmark(
        "hosts.moves",
        "A host that leaves",
        "Two real hosts in network namespaces with a rank each, and a spare that takes the place "
        "of one: a move, a death, a stop and a new start, and torchrun, in one run.",
    ),
    "backends": Benchmark(
        "hosts.backends",
        "etcd beside the hosts' own store",
        "Restarts of a job on three hosts in network namespaces, with each store in turns.",
    ),
    "soak": Benchmark(
        "inprocess.soak",
        "A thousand restarts in a row",
        "Each rank, each monitor process and the job's store, early and at the end.",
    ),
    "shared-reads": Benchmark(
        "checkpoint.shared_reads",
        "Restores of replicas on several hosts",
        "What they read of one storage, and how long that takes where its bandwidth is the limit.",
    ),
    "checkpoint": Benchmark(
        "checkpoint.run",
        "Checkpoints",
        "A transformer with Adam, 768 MiB in one process and 192 MiB in each of four gloo "
        "ranks; ways to save alternate, and each figure is also a ratio to what the machine can"
        " do in the same run (a copy into warm memory, the faster of a buffered and an "
        "`O_DIRECT` write with fsync, the fastest raw read with checksums).",
    ),
    "many-tensors": Benchmark(
        "checkpoint.many_tensors",
        "Many small tensors",
        "Two ranks with DDP, gloo and Adam; all layers in one `Sequential`, whose own "
        "`load_state_dict` takes a time that grows with their square.",
    ),
    "slowdown": Benchmark(
        "checkpoint.slowdown",
        "Slowdown by the interval between checkpoints",
        "The transformer of the section above, which saves 192 MiB (1.1 GB with `--large`) every "
        "1 to 100 steps.",
    ),
    "copies": Benchmark(
        "copies.run",
        "Copies in another host's memory",
        "The step rate of a training that saves with and without `replicas=1`, and the time "
        "from the loss of a host to the first step after the restore.",
    ),
    "ablation": Benchmark(
        "checkpoint.ablation",
        "Recycled files",
        "The same saves with and without them, in turns.",
    ),
    "recovery": Benchmark(
        "recovery.run",
        "Beside other systems",
        "Whole systems train the same model on the same data with two ranks, and get the same "
        "exceptions and SIGKILLs in turn, one a minute and one every ten seconds.",
    ),
    "steps-under-failures": Benchmark(
        "recovery.steps",
        "Time to a number of steps under failures",
        "Whole systems make the same steps, with the exceptions, SIGKILLs, hangs and orders to "
        "leave of one seed.",
    ),
    "ettr": Benchmark(
        "recovery.ettr",
        "Effective training time ratio",
        "A projection from the figures on this page and published failure rates, for outlast and "
        "for torchrun with DCP by one formula. It measures nothing itself.",
    ),
    "elastic": Benchmark(
        "elastic.run",
        "Elastic state",
        "Positions, loaders, saves and restores of a job beside torch's, all ranks on one machine.",
    ),
    "rollback": Benchmark(
        "rollback.run",
        "No rollback where a replica survives",
        "Two ranks with DDP under `outlast run`, and a fault three steps after a checkpoint; "
        "the state comes from the survivors (`Job`), or from a checkpoint (`Job(live=False)`) "
        "in memory or on disk.",
    ),
    "useful-step": Benchmark(
        "rollback.useful_step",
        "From a fault to the next useful step",
        "Ranks under `outlast run` with a standby; rank 1 fails while the others wait for it in "
        "their collective, and all continue from the survivors.",
    ),
    "silent": Benchmark(
        "elastic.silent",
        "Checks for silent faults",
        "Segments of ten steps with and without both checks at their default intervals "
        "alternate in the same two processes.",
    ),
}
"""The benchmarks by name, in the order of the page."""


def load(name: str) -> Any:
    """Imports the module of a benchmark."""
    return importlib.import_module(f"benchmarks.{MODULES[name].module}")


def write_docs(page: Path, results: dict[str, Any]) -> None:
    """Writes the tables of `results` between the markers of `page`. A benchmark without a result
    keeps its tables.

    Raises:
        ValueError: if the page has no markers.
    """
    before, begin, rest = page.read_text().partition(_BEGIN)
    figures, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the lines {_BEGIN} and {_END}")
    present = _sections(figures)
    parts = []
    for name, (_, title, _) in MODULES.items():
        if name in results:
            parts.append(_section(name, results[name]))
        elif title in present:
            parts.append(present[title])
    page.write_text(f"{before}{_BEGIN}\n\n" + "\n".join(parts) + f"\n{_END}{after}")


def _sections(figures: str) -> dict[str, str]:
    """The sections of the page by title, each as `_section` returns it."""
    _, *found = re.split(r"^(?=## )", figures, flags=re.MULTILINE)
    return {each[3 : each.index("\n")]: each.rstrip("\n") + "\n" for each in found}


def _section(name: str, result: dict[str, Any]) -> str:
    machine = "; ".join(f"{key} {value}" for key, value in result["machine"].items())
    lines = [
        f"## {MODULES[name].title}",
        "",
        f"`python -m benchmarks {name}`: {MODULES[name].method}",
        "",
    ]
    if result["quick"]:
        lines.extend(["**A quick run: these figures only test the benchmark.**", ""])
    lines.extend(to_markdown(sheet) for sheet in load(name).sheets(result["data"]))
    lines.extend([f"Measured on: {machine}.", ""])
    return "\n".join(lines)
