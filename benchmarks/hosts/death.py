"""From the death of a host to the next training step: three hosts in network namespaces, of which
one after another loses power, and comes back. It needs root, or user namespaces.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lib.sheets import Sheet, median

__all__ = ["run", "sheets"]

_EXAMPLE = Path(__file__).parents[2] / "examples" / "hosts"
_LEASE_S, _LIMIT_S = 5.0, 180.0


@dataclasses.dataclass
class _Job:
    """The launchers of a job, one on each host, and the traces of their workers."""

    network: Any
    folder: Path
    starts: int = 0

    def start(self, host: str) -> None:
        """Starts a launcher with the default options, except that an idle one costs nothing."""
        self.starts += 1
        (self.folder / f"tmp-{host}").mkdir(exist_ok=True)
        command = [sys.executable, "-m", "outlast.launch", "run", "--nnodes=2:3", "--rdzv-id=bench"]
        command += ["--standby=0", "--rdzv-endpoint=h1:29400,h2:29400,h3:29400"]
        command += [f"--rdzv-conf=record_dir={self.folder}/records"]
        command += [f"--events-dir={self.folder}/events", str(_EXAMPLE / "train.py")]
        command += [f"--state={self.folder}/state", f"--trace={self.folder}/trace", "--pause=4"]
        environment = {**os.environ, "TMPDIR": str(self.folder / f"tmp-{host}")}
        environment.update(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
        with (self.folder / f"{host}-{self.starts}.log").open("wb") as out:
            self.network[host].start(command, environment, self.folder, stdout=out, stderr=out)

    def first_step(self, after: float, size: int) -> dict[str, Any]:
        """The first step with `size` ranks after a time."""
        found: dict[str, Any] = _until(
            lambda: min(
                (
                    s
                    for s in self._lines("trace/*.jsonl")
                    if s["size"] == size and s["time"] > after
                ),
                key=lambda step: float(step["time"]),
                default=None,
            ),
            f"a step with {size} ranks",
        )
        return found

    def event(self, kind: str, after: float) -> float | None:
        """When the first event of this kind came after a time."""
        times = (e["time"] for e in self._lines("events/**/*.jsonl") if e["kind"] == kind)
        return min((at for at in times if at > after), default=None)

    def _lines(self, pattern: str) -> list[dict[str, Any]]:
        """The records of all hosts, with times of the machine's clock."""
        found = []
        for file in self.folder.glob(pattern):
            for line in file.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    record = json.loads(line)
                    host = record.get("host", "")
                    if host in self.network.names:
                        record["time"] -= self.network[host].clock_offset_s
                        found.append(record)
        return found


def run(quick: bool) -> dict[str, Any]:
    """Measures each death, of each host in turn, and each return."""
    sys.path.insert(0, str(_EXAMPLE))
    from network import Network, unavailable  # type: ignore[import-not-found]

    if reason := unavailable():
        sys.exit(f"no hosts can be made: {reason}")
    deaths = []
    with tempfile.TemporaryDirectory() as name, Network(["h1", "h2", "h3"]) as network:
        folder = Path(name)
        (folder / "trace").mkdir()
        job = _Job(network, folder)
        for host in network.names:
            job.start(host)
        job.first_step(0.0, size=3)
        for number in range(3 if quick else 15):
            time.sleep(3.0)
            host = network.names[number % 3]
            deaths.append(_one_death(job, host))
            print(host, {k: round(v, 2) for k, v in deaths[-1].items()}, flush=True)
    return {"lease": _LEASE_S, "deaths": deaths}


def _one_death(job: _Job, host: str) -> dict[str, float]:
    dead = time.monotonic()
    job.network[host].power_off()
    step = job.first_step(dead, size=2)
    parts = {
        "declared lost": job.event("host_lost", dead),
        "left the function": job.event("left_function", dead),
        "members decided": job.event("assigned", dead),
        "entered again": job.event("entered", dead),
    }
    found = {name: at - dead for name, at in parts.items() if at is not None}
    found["next step"] = step["time"] - dead
    job.network.boot(host)
    back = time.monotonic()
    job.start(host)
    found["all hosts train"] = job.first_step(back, size=3)["time"] - back
    return found


def sheets(data: dict[str, Any]) -> list[Sheet]:
    """The moments after a death."""
    names = list(data["deaths"][0])
    rows = []
    for name in names:
        values = [death[name] for death in data["deaths"] if name in death]
        rows.append(
            (name, *(f"{v:.2f} s" for v in (min(values), median(values) or 0, max(values))))
        )
    return [
        Sheet(
            "From the death of a host to the next step",
            ("after the death", "best", "median", "worst"),
            rows,
            f"{len(data['deaths'])} deaths, of each of 3 hosts in turn; a lease of "
            f"{data['lease']:g} s, so that a host is declared lost {1.2 * data['lease']:g} s after "
            "its last heartbeat; `--nnodes 2:3`, no spare. The last row is from the start of a "
            "launcher on the host that came back, without standby processes.",
        )
    ]


def _until(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + _LIMIT_S
    while not (value := found()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited in vain for {what}")
        time.sleep(0.02)
    return value
