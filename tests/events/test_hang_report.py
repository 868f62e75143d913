"""Which of several hung ranks the others waited for."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from outlast.events.hung_ranks import (
    BETWEEN,
    IN_SAVE,
    IN_STEP,
    LEFT,
    NO_MORE,
    hung_ranks,
    is_uneven,
)
from outlast.events.types import Fault


def monitor(member: int, **fields: Any) -> Fault:
    """The report of a rank's monitor process."""
    return Fault(member=member, rank=member, interruption="SOFT_TIMEOUT", **fields)


def rank(member: int, waits: bool = False, pings: int = 5, collectives: int = 9) -> Fault:
    """A rank's own report."""
    return monitor(member, own_report=True, consequence=waits, pings=pings, collectives=collectives)


def echo(member: int) -> Fault:
    """A closed connection, on a rank that waited."""
    return Fault(member=member, rank=member, interruption="EXCEPTION", consequence=True)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param([rank(0, waits=True), rank(1, waits=True), rank(2)], id="in user code"),
        pytest.param([rank(0), rank(1), rank(2, collectives=8)], id="fewer collectives"),
        pytest.param(
            [rank(0, waits=True, collectives=3), rank(1), rank(2, collectives=8)],
            id="who waits is not compared",
        ),
        pytest.param([rank(0), rank(1), rank(2, pings=4)], id="fewer pings"),
        pytest.param(
            [monitor(0, pings=1), echo(0), rank(1, waits=True), rank(2)],
            id="woken by the end of a connection",
        ),
        pytest.param(
            [rank(0, waits=True), monitor(0, pings=1), rank(1, waits=True), rank(2)],
            id="a monitor that speaks after its rank",
        ),
        pytest.param(
            [
                rank(0, waits=True, pings=4),
                rank(1, waits=True, pings=4),
                rank(2, waits=True, pings=3),
            ],
            id="all wait",
        ),
    ],
)
def test_the_cause_comes_first_in_any_order_of_reports(said: list[Fault]) -> None:
    for faults in itertools.permutations(said):
        hung = hung_ranks(faults)
        assert hung[0].member == 2
        assert sorted(fault.member for fault in hung) == [0, 1, 2][-len(hung) :]
        assert all(fault.consequence or fault.pings >= hung[0].pings for fault in hung[1:])


def test_a_rank_ahead_of_another_is_a_consequence() -> None:
    assert [f.consequence for f in hung_ranks([rank(0), rank(1, collectives=8)])] == [False, True]


def test_other_faults_are_none_of_them() -> None:
    assert hung_ranks([echo(0), Fault(member=1, interruption="TERMINATED")]) == []


def group(
    number: int, last: bool = True, call: str = "all_reduce of float32 [3]"
) -> dict[str, Any]:
    return {"label": "group 'tp'", "number": number, "call": call, "last": last}


def in_torch(member: int, **groups: dict[str, Any]) -> Fault:
    """A rank that waits inside torch, and has begun this in its groups."""
    return dataclasses.replace(rank(member, waits=True), cause="at a line", groups=groups)


def test_of_ranks_that_all_wait_the_one_that_has_not_begun_a_collective_comes_first() -> None:
    said = [in_torch(0, tp=group(7)), in_torch(1, dp=group(3)), in_torch(2, tp=group(6))]
    for faults in itertools.permutations(said):
        hung = hung_ranks(faults)
        assert hung[0].member == 2
        assert hung[0].cause == (
            "at a line; it has begun 6 of the collectives of group 'tp', "
            "and rank 0 waits in number 7, all_reduce of float32 [3]"
        )
        assert {fault.cause for fault in hung[1:]} == {"at a line"}
        assert hung_ranks(hung) == hung  # the words are not added twice


def test_only_the_last_collective_is_waited_in() -> None:
    """Rank 0 has passed that of `dp`, as the root of a broadcast does."""
    said = [
        in_torch(0, dp=group(4, last=False), tp=group(7)),
        in_torch(1, dp=group(3, last=False), tp=group(7)),
        in_torch(2, tp=group(5)),
    ]
    assert hung_ranks(said)[0].member == 2


def test_two_ranks_may_wait_for_each_other() -> None:
    said = [
        in_torch(0, tp=group(7), dp=group(2, last=False)),
        in_torch(1, tp=group(6, last=False), dp=group(3)),
    ]
    texts = [fault.cause for fault in hung_ranks(said)]
    assert all("; it has begun " in text for text in texts)


def test_operations_that_differ_are_said() -> None:
    barrier = group(7, call="barrier at b.py:2 in f")
    said = [in_torch(0, tp=group(7)), in_torch(1, tp=barrier), in_torch(2, tp=group(7))]
    assert hung_ranks(said)[0].cause.endswith(
        "; collective 7 of group 'tp' is all_reduce of float32 [3] on ranks 0, 2, "
        "and barrier at b.py:2 in f on rank 1"
    )
    elsewhere = group(7, call=f"{group(7)['call']} at b.py:2 in f")
    same = [in_torch(0, tp=group(7)), in_torch(1, tp=elsewhere)]
    assert "; collective" not in hung_ranks(same)[0].cause
    gathers = [in_torch(n, tp=group(7, call=f"all_gather of int64 [{n}]")) for n in range(2)]
    assert "is all_gather" not in hung_ranks(gathers)[0].cause


def loop(member: int, made: int, passes: int, at: str, *, waits: bool = True) -> Fault:
    """A rank whose loop is there."""
    own = rank(member, waits=waits)
    return dataclasses.replace(own, cause="at a line", made=made, passes=passes, loop_at=at)


def test_a_rank_that_has_no_more_batches_is_named_with_the_steps_of_each() -> None:
    said = [loop(0, 18, 1, IN_STEP), loop(1, 18, 2, NO_MORE), loop(2, 18, 1, IN_STEP)]
    for faults in itertools.permutations(said):
        first, *others = hung_ranks(faults)
        text = "rank 1 has no more batches (18 steps), ranks 0, 2 are in step 19; all ranks must"
        assert first.member == 1
        assert first.cause.startswith(text)
        assert first.cause.endswith("; at a line")
        assert "DistributedSampler" in first.cause
        assert is_uneven(first.cause)
        assert {other.cause for other in others} == {"at a line"}
        assert hung_ranks([first, *others]) == [first, *others]


@pytest.mark.parametrize(
    ("over", "behind", "said", "certain"),
    [
        ((39, 3, LEFT), (39, 2, IN_STEP), "has left its loop (39 steps), rank 0 is in step 40", 1),
        ((39, 3, LEFT), (41, 2, BETWEEN), "has left its loop (39 steps), rank 0 has made 41; ", 1),
        ((39, 3, LEFT), (41, 2, IN_STEP), "has left its loop (39 steps), rank 0 is in step 42", 1),
        (
            (9, 1, IN_STEP),
            (9, 0, IN_STEP),
            "has no more batches (9 steps), rank 0 waits, perhaps in",
            0,
        ),
        ((9, 1, LEFT), (9, 0, ""), "has left its loop (9 steps), rank 0 is in step 10", 1),
        ((9, 1, LEFT), (9, 0, BETWEEN), "", 0),  # in what follows the step
        ((10, 1, NO_MORE), (9, 0, IN_STEP), "", 0),  # it has made its last step with all others
        ((9, 1, NO_MORE), (9, 1, IN_STEP), "", 0),
        ((9, 1, NO_MORE), (-1, 0, ""), "", 0),  # it has no job
    ],
)
def test_only_a_step_that_the_others_wait_in_counts(
    over: tuple[int, int, str], behind: tuple[int, int, str], said: str, certain: bool
) -> None:
    cause = hung_ranks([loop(0, *behind), loop(1, *over)])[0].cause
    assert said in cause
    assert bool(said) == cause.startswith("rank 1 ")
    assert is_uneven(cause) == bool(certain)


@pytest.mark.parametrize("hangs", [0, 1])
def test_a_rank_that_hangs_by_itself_is_the_cause(hangs: int) -> None:
    """In its evaluation, say, or in the last step."""
    said = [loop(0, 9, 0, IN_STEP, waits=hangs != 0), loop(1, 9, 1, NO_MORE, waits=hangs != 1)]
    assert hung_ranks(said)[0].member == hangs
    assert hung_ranks(said)[0].cause == "at a line"


@pytest.mark.parametrize("other", [(9, 0, IN_STEP), (9, 0, BETWEEN), (10, 0, IN_STEP), (9, 0, "")])
def test_a_rank_that_saves_alone_is_named(other: tuple[int, int, str]) -> None:
    said = [loop(1, *other), loop(0, 9, 0, BETWEEN + IN_SAVE)]
    for faults in itertools.permutations(said):
        first, second = hung_ranks(faults)
        text = (
            "rank 0 waits in job.save(), after step 9, which rank 1 did not call; call job.save()"
        )
        assert first.cause.startswith(text)
        assert first.cause.endswith("; at a line")
        assert second.cause == "at a line"
        assert is_uneven(first.cause)
        assert hung_ranks([first, second]) == [first, second]


@pytest.mark.parametrize(
    "said",
    [
        [loop(0, 9, 0, IN_SAVE), loop(1, 9, 0, IN_SAVE)],
        [loop(0, 9, 0, IN_SAVE), loop(1, 8, 0, IN_STEP)],  # which waits for something else
        [loop(0, 9, 0, IN_SAVE), loop(1, 9, 0, IN_STEP, waits=False)],  # it may still come
    ],
)
def test_ranks_that_may_meet_in_a_save_are_not_uneven(said: list[Fault]) -> None:
    assert not any(is_uneven(fault.cause) for fault in hung_ranks(said))


def test_a_save_at_the_end_of_unequal_batches_is_a_rank_without_more() -> None:
    said = [loop(0, 18, 1, IN_STEP), loop(1, 18, 2, NO_MORE + IN_SAVE)]
    assert hung_ranks(said)[0].cause.startswith("rank 1 has no more batches (18 steps), rank 0 is")
