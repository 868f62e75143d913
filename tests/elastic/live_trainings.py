"""Runs `live.py`, and compares a run with faults to one without, bit by bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from procs import Job, Line

Ranks = Callable[..., Job]


def fault(rank: int, at: str, do: str, **more: Any) -> dict[str, Any]:
    """A fault of the plan."""
    return {"rank": rank, "at": at, "do": do, **more}


def later(
    rank: int, step: int, at: str, do: str, nprocs: int = 2, **more: Any
) -> list[dict[str, Any]]:
    """A fault of `rank` that waits until the other ranks have completed `step`, too."""
    others = [other for other in range(nprocs) if other != rank]
    marks = [fault(other, f"done {step}", f"mark {step} of {other}") for other in others]
    waits = [f"await {step} of {other}" for other in others]
    return [*marks, fault(rank, at, ", ".join([*waits, do]), **more)]


@dataclasses.dataclass
class Run:
    """The results of one job of `live.py`."""

    lines: list[Line]
    errors: str

    def events(self, event: str) -> list[Line]:
        return [line for line in self.lines if line["event"] == event]

    def restored(self, iteration: int = 1) -> dict[int, tuple[int, str]]:
        """The step and the source of each rank's restore."""
        found = [line for line in self.events("restored") if line["iteration"] == iteration]
        return {line["of"]: (line["step"], line["source"]) for line in found}

    def losses(self) -> dict[tuple[int, int], set[str]]:
        """All losses of each rank at each step: one, however often the step was made."""
        found: dict[tuple[int, int], set[str]] = {}
        for line in self.events("trained"):
            found.setdefault((line["of"], line["step"]), set()).add(line["loss"])
        return found

    def ended(self) -> dict[int, str]:
        """The state of each rank at the end: the statistics of a batch norm differ."""
        return {line["of"]: line["state"] for line in self.events("ended")}

    def times(self, rank: int, step: int) -> int:
        """How often a rank has made a step."""
        made = [(line["of"], line["step"]) for line in self.events("trained")]
        return made.count((rank, step))


def ranks_of(folder: Path, script: Path, zygote: Any) -> Ranks:
    """As the fixture `ranks`, for more than one test, or a script elsewhere."""

    def ranks(_: str, plan: str, nprocs: int) -> Job:
        return Job(folder, script, nprocs=nprocs, args=[plan], spawn=zygote.spawn)

    return ranks


def host(folder: Path, name: str) -> dict[str, str]:
    """The environment of a process on a host of its own: what is kept on another one is out of
    reach.
    """
    own = folder / f"host-{name}"
    own.mkdir(exist_ok=True)
    found = {"OUTLAST_HOST": name, "OUTLAST_HOST_ADDR": "127.0.0.1", "TMPDIR": str(own)}
    return {**found, "LOCAL_WORLD_SIZE": "1"}


def run(
    ranks: Ranks,
    path: Path,
    *faults: dict[str, Any],
    nprocs: int = 2,
    script: str = "live",
    replace: bool = True,
    hosts: bool = False,
    **plan: Any,
) -> Run:
    """Runs a job to its end; a rank that is killed is started again, if `replace`; with `hosts`,
    each process is on a host of its own, which is lost with it, unless the fault has `stays`.
    """
    folder = path.parent
    arguments = json.dumps({"path": str(path), "faults": faults, **plan})
    with ranks(script, arguments, nprocs=nprocs) as job:
        names = [f"h{rank}" for rank in range(nprocs)]
        for rank, name in enumerate(names):
            job.start(rank, env=host(folder, name) if hosts else {})
        for each in faults:
            # A process that is stopped is ended by SIGTERM after the hard timeout.
            ends = [end for name, end in (("SIGKILL", -9), ("SIGSTOP", -15)) if name in each["do"]]
            if ends:
                assert [job.wait(each["rank"])] == ends, job.errors(each["rank"])
                if hosts and not each.get("stays"):
                    job.end_writers(names[each["rank"]])
                    names[each["rank"]] += "-spare"
                if replace:
                    where = host(folder, names[each["rank"]]) if hosts else {}
                    job.start(each["rank"], env={"OUTLAST_REPLACEMENT": "1", **where})
        codes = job.wait_all()
        errors = "\n".join(job.errors(rank) for rank in range(nprocs))
        assert set(codes.values()) <= ({0} if replace else {0, -9}), errors
        return Run([line for rank in range(nprocs) for line in job.lines(rank)], errors)


def check_same(faulty: Run, reference: Run, not_told: tuple[int, int] | None = None) -> None:
    """Every loss, and the state at the end, are those of the run without faults. `not_told`: the
    rank and step of which no loss was printed, because the rank received the state after it.
    """
    wanted = {key: loss for key, loss in reference.losses().items() if key != not_told}
    assert faulty.losses() == wanted, faulty.errors
    assert faulty.ended() == reference.ended(), faulty.errors
