"""Sentences about faults that raised no error."""

from __future__ import annotations

from collections.abc import Iterator

from outlast.events.report.model import Mismatch, Report, Straggler
from outlast.events.report.words import listed, one_line
from outlast.system.units import duration_text

_NAMED = 3


def describe_silent_faults(report: Report) -> Iterator[str]:
    """A sentence for each set of ranks that differed, and for each straggler."""
    for mismatch in report.mismatches:
        yield one_line(_describe_mismatch(mismatch))
    for straggler in report.stragglers:
        yield one_line(_describe_straggler(straggler))


def _describe_mismatch(mismatch: Mismatch) -> str:
    each = [
        f"rank {rank} on {one_line(host)}"
        for rank, host in zip(mismatch.ranks, mismatch.hosts, strict=False)
    ]
    which = listed(each) if each else "unknown ranks"
    if mismatch.majority:
        found = f"{which} differed from the other {mismatch.replicas - len(each)} replicas"
    else:
        found = f"{which} differed, without a majority that says which was wrong"
    names = [one_line(name) for name in mismatch.parameters]
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    where = f" in {listed([*names[:_NAMED], *more])}" if names else ""
    again = f", in {mismatch.checks} checks" if mismatch.checks > 1 else ""
    return (
        f"Parameters: after step {mismatch.step}, {found}{where}{again}; they were equal after "
        f"step {mismatch.clean_step}."
    )


def _describe_straggler(straggler: Straggler) -> str:
    return (
        f"Straggler: rank {straggler.rank} on {one_line(straggler.straggler_host)}, found after "
        f"step {straggler.step}: {duration_text(straggler.seconds)} for its own part of a step; "
        f"the other ranks took {duration_text(straggler.typical_seconds)}."
    )
