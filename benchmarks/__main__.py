"""`python -m benchmarks [NAME ...] [--quick] [--write-docs]`: runs benchmarks, and stores results.

Results go to build/benchmarks.json, each with the machine and the versions that it was measured on.
`--write-docs` updates the tables in benchmarks/RESULTS.md from that file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.lib.machine import describe
from benchmarks.lib.pages import MODULES, load, write_docs
from benchmarks.lib.sheets import show


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "name", nargs="*", metavar="NAME", help="the benchmarks to run; all by default"
    )
    parser.add_argument(
        "--quick", action="store_true", help="few repetitions, to test the benchmarks"
    )
    parser.add_argument(
        "--keep-peer",
        action="store_true",
        help="restart: measure only outlast; keep the stored results of the peer",
    )
    parser.add_argument(
        "--large", action="store_true", help="slowdown: a state of 1.1 GB instead of 192 MiB"
    )
    parser.add_argument(
        "--beside", type=Path, help="limits: measure the code of this other checkout too"
    )
    parser.add_argument("--write-docs", action="store_true", help="update benchmarks/RESULTS.md")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks.json"))
    options = parser.parse_args()
    if options.large and options.name != ["slowdown"]:
        parser.error("--large is for the benchmark slowdown only")
    if options.beside and options.name != ["limits"]:
        parser.error("--beside is for the benchmark limits only")
    names = options.name or ([] if options.write_docs else list(MODULES))
    # torch resolves the name of every host that it connects to. If the resolver drops the query,
    # each connection takes five seconds, with outlast and with the peer.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    # Else every new process compiles the modules again; those of an installed package are compiled.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Ends as after an exception, so that benchmarks end the processes that they have started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console(width=None if Console().is_terminal else 140)
    for name in names:
        module = load(name)
        kept = json.loads(options.out.read_text())[name]["data"] if options.keep_peer else None
        more: dict[str, Any] = {"large": True} if options.large else {}
        more |= {"beside": options.beside.resolve()} if options.beside else {}
        data = module.run(options.quick, *[kept] if kept else [], **more)
        _store(options.out, name, {"quick": options.quick, "machine": describe(), "data": data})
        for sheet in module.sheets(data):
            show(console, sheet)
    if options.write_docs:
        write_docs(Path("benchmarks/RESULTS.md"), json.loads(options.out.read_text()))
        console.print("benchmarks/RESULTS.md was updated")


def _store(path: Path, name: str, result: dict[str, Any]) -> None:
    """Stores a result in the file, next to those of other benchmarks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(path.read_text()) if path.exists() else {}
    results[name] = result
    path.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
