"""Faults that raised no error, in the report: replicas that differed, slow ranks."""

from __future__ import annotations

import dataclasses

from outlast.events import Event, ReplicaMismatch, StragglerFound
from outlast.events.report import build
from outlast.events.report.sentences import describe


def mismatch(step: int, *ranks: int, majority: bool = True) -> ReplicaMismatch:
    return ReplicaMismatch(
        host="a",
        time=float(step),
        step=step,
        clean_step=100,
        replicas=4,
        ranks=list(ranks),
        hosts=["b<script>" for _ in ranks],
        majority=majority,
        parameters=["first.weight", "first.bias"],
    )


def test_replicas_that_differ_are_one_sentence_for_each_set_of_ranks() -> None:
    events: list[Event] = [mismatch(200, 2), mismatch(300, 2), mismatch(400, 1, 3, majority=False)]
    report = build(events)
    assert [(each.ranks, each.checks, each.at) for each in report.mismatches] == [
        ((2,), 2, 0.0),
        ((1, 3), 1, 200.0),
    ]
    first, second = (text for text in describe("ending", report) if text.startswith("Parameters"))
    assert first == (
        "Parameters: after step 200, rank 2 on b<script> differed from the other 3 replicas in "
        "first.weight and first.bias, in 2 checks; they were equal after step 100."
    )
    assert "rank 1 on b<script> and rank 3 on b<script> differed, without a majority" in second


def test_a_straggler_is_one_sentence() -> None:
    found = StragglerFound(
        host="a",
        time=5.0,
        step=300,
        straggler=3,
        straggler_host="b",
        seconds=0.15,
        typical_seconds=0.1,
        windows=3,
    )
    report = build([found])
    assert dataclasses.asdict(report)["stragglers"][0]["rank"] == 3
    assert [text for text in describe("ending", report) if text.startswith("Straggler")] == [
        "Straggler: rank 3 on b, found after step 300: 150.0 ms for its own part of a step; the "
        "other ranks took 100.0 ms."
    ]
