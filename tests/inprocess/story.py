"""What the ranks of a job said, put together: who was where, and in which order."""

from __future__ import annotations

from typing import Any

from procs import Job, Line

View = list[tuple[int, int]]


def events(job: Job, rank: int, event: str) -> list[Line]:
    """Everything of one kind that the processes of one (first) rank said."""
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
    """How the job began, and how it ended; who saw which view between the two may differ."""
    seen = views(job)
    return [seen[0], seen[max(seen)]]


def full(size: int) -> View:
    """The view with `size` members: ranks dense from 0, world sizes equal (R1)."""
    return [(rank, size) for rank in range(size)]


def assert_never_together(job: Job) -> None:
    """R2: nobody was in the function at k+1 before everyone who lived had left it at k.

    The clock is one for all processes of a host.
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
    """What the wrapped function returned, by first rank."""
    ends = {rank: events(job, rank, "returned") for rank in range(job.nprocs)}
    return {rank: lines[-1]["value"] for rank, lines in ends.items() if lines}


def errors(job: Job) -> str:
    """What all ranks wrote to stderr, for the message of an assertion."""
    return "\n".join(f"--- rank {rank}\n{job.errors(rank)}" for rank in range(job.nprocs))
