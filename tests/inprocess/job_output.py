"""Evaluates the output of a job's ranks: which rank was where, and in which order."""

from __future__ import annotations

from typing import Any

from procs import Job, Line

View = list[tuple[int, int]]


def events(job: Job, rank: int, event: str) -> list[Line]:
    """All lines of one event from the processes of one initial rank."""
    return [line for line in job.lines(rank) if line["event"] == event]


def said(event: str, **fields: Any) -> Any:
    """A predicate for `Job.wait_for_line`."""
    wanted = {"event": event, **fields}
    return lambda line: wanted.items() <= line.items()


def views(job: Job) -> dict[int, View]:
    """By iteration: the rank and world size at which each process entered the function, sorted."""
    seen: dict[int, View] = {}
    for first in range(job.nprocs):
        for line in events(job, first, "entered"):
            seen.setdefault(line["iteration"], []).append((line["rank"], line["world_size"]))
    return {iteration: sorted(view) for iteration, view in sorted(seen.items())}


def first_and_last(job: Job) -> list[View]:
    """The first and the last view; the views between them may differ from run to run."""
    seen = views(job)
    return [seen[0], seen[max(seen)]]


def full(size: int) -> View:
    """The view with `size` members: ranks dense from 0, world sizes equal (R1)."""
    return [(rank, size) for rank in range(size)]


def assert_never_together(job: Job) -> None:
    """R2: no rank was in the function at k+1 before every live rank had left it at k.

    All processes of a host have the same clock.
    """
    came: dict[int, list[float]] = {}
    went: dict[int, list[float]] = {}
    for rank in range(job.nprocs):
        for line in events(job, rank, "entered"):
            came.setdefault(line["iteration"], []).append(line["t"])
        for line in events(job, rank, "left"):
            went.setdefault(line["iteration"], []).append(line["t"])
    for iteration, times in came.items():
        before = went.get(iteration - 1, [])
        assert not before or max(before) < min(times), f"iteration {iteration} began too early"


def returned(job: Job) -> dict[int, Any]:
    """The return values of the wrapped function, by initial rank."""
    ends = {rank: events(job, rank, "returned") for rank in range(job.nprocs)}
    return {rank: lines[-1]["value"] for rank, lines in ends.items() if lines}


def errors(job: Job) -> str:
    """The stderr of all ranks, for the message of an assertion."""
    return "\n".join(f"--- rank {rank}\n{job.errors(rank)}" for rank in range(job.nprocs))
