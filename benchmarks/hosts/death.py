"""From the death of a host to the next training step: three hosts in network namespaces, of which
one after another loses power, and comes back; and the same with a spare host, which continues at
the newest step, or from a checkpoint. It needs root, or user namespaces.
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
_WAYS: dict[str, tuple[str, ...]] = {
    "the newest step": (),
    "the newest checkpoint": ("--no-live",),
}


@dataclasses.dataclass
class _Job:
    """The launchers of a job, one on each host, and the traces of their workers."""

    network: Any
    folder: Path
    places: str = "2:3"
    options: tuple[str, ...] = ("--pause=4",)
    starts: int = 0

    def __post_init__(self) -> None:
        (self.folder / "trace").mkdir(parents=True)

    def start(self, host: str) -> None:
        """Starts a launcher with the default options, except that an idle one costs nothing."""
        self.starts += 1
        (self.folder / f"tmp-{host}").mkdir(exist_ok=True)
        command = [sys.executable, "-m", "outlast.launch", "run", f"--nnodes={self.places}"]
        command += ["--rdzv-id=bench", "--standby=0"]
        command += ["--rdzv-endpoint=h1:29400,h2:29400,h3:29400"]
        command += [f"--rdzv-conf=record_dir={self.folder}/records"]
        command += [f"--events-dir={self.folder}/events", str(_EXAMPLE / "train.py")]
        command += [f"--state={self.folder}/state", f"--trace={self.folder}/trace"]
        command += self.options
        environment = {**os.environ, "TMPDIR": str(self.folder / f"tmp-{host}")}
        environment.update(OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
        with (self.folder / f"{host}-{self.starts}.log").open("wb") as out:
            self.network[host].start(command, environment, self.folder, stdout=out, stderr=out)

    def steps(self) -> list[dict[str, Any]]:
        return self._lines("trace/*.jsonl")

    def first_step(self, after: float, size: int, iteration: int = 0) -> dict[str, Any]:
        """The first step with `size` ranks after a time, in this iteration or a later one."""
        found: dict[str, Any] = _until(
            lambda: min(
                (
                    s
                    for s in self.steps()
                    if s["size"] == size and s["time"] > after and s["iteration"] >= iteration
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
        job = _Job(network, Path(name))
        for host in network.names:
            job.start(host)
        job.first_step(0.0, size=3)
        for number in range(3 if quick else 15):
            time.sleep(3.0)
            host = network.names[number % 3]
            deaths.append(_one_death(job, host))
            print(host, {k: round(v, 2) for k, v in deaths[-1].items()}, flush=True)
    spares = {way: _with_spare(quick, options) for way, options in _WAYS.items()}
    return {"lease": _LEASE_S, "deaths": deaths, "with a spare": spares}


def _with_spare(quick: bool, options: tuple[str, ...]) -> list[dict[str, float]]:
    """Deaths of hosts whose place a spare takes: the pause, and the steps that are made again."""
    from network import Network

    deaths = []
    with tempfile.TemporaryDirectory() as name, Network(["h1", "h2", "h3", "h4"]) as network:
        job = _Job(network, Path(name), "3", ("--pause=0.5", *options))
        for host in network.names:
            job.start(host)
        job.first_step(0.0, size=3)
        for number in range(1 if quick else 5):
            time.sleep(8.0)  # some steps after a checkpoint, another number each time
            last = max(job.steps(), key=lambda step: (step["iteration"], step["step"]))
            host = min(s["host"] for s in job.steps() if s["iteration"] == last["iteration"])
            dead = time.monotonic()
            network[host].power_off()
            first = job.first_step(dead, size=3, iteration=last["iteration"] + 1)
            reached = max(s["step"] for s in job.steps() if s["iteration"] < first["iteration"])
            again = reached + 1 - first["step"]
            deaths.append({"pause": first["time"] - dead, "steps made again": again})
            print(number, options, deaths[-1], flush=True)
            network.boot(host)
            job.start(host)
    return deaths


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
        ),
        *_sheet_with_spare(data),
    ]


def _sheet_with_spare(data: dict[str, Any]) -> list[Sheet]:
    found = data.get("with a spare", {})
    rows = []
    for way, deaths in found.items():
        pauses = [death["pause"] for death in deaths]
        again = [int(death["steps made again"]) for death in deaths]
        texts = [f"{v:.2f} s" for v in (min(pauses), median(pauses) or 0, max(pauses))]
        rows.append((way, *texts, f"{min(again)} to {max(again)}"))
    count = max((len(deaths) for deaths in found.values()), default=0)
    return (
        [
            Sheet(
                "The death of a host whose place a spare takes",
                ("continues at", "next step after: best", "median", "worst", "steps made again"),
                rows,
                f"{count} deaths each, of hosts of 3 with a spare (`--nnodes 3`); a checkpoint "
                "every 10 steps of half a second.",
            )
        ]
        if rows
        else []
    )


def _until(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + _LIMIT_S
    while not (value := found()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited in vain for {what}")
        time.sleep(0.02)
    return value
