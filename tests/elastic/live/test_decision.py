"""From which step and ranks a job continues, decided from what the ranks have."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec
import pytest

from outlast.elastic.job.live.choice import (
    Choice,
    Offer,
    StateToSave,
    choose,
)
from outlast.elastic.job.live.frozen import Held
from outlast.elastic.job.live.own_state import Record, Slots, State, read
from outlast.elastic.job.live.to_save import choose_to_reshard
from outlast.elastic.job.live.transfer import rounds


def record(rank: int, step: int, *, final: bool = True, size: int = 2, passes: int = 0) -> Record:
    return Record("000000001-a", step, final, rank, size, passes)


def offer(rank: int, step: int | None, *records: Record, size: int = 2, **held: Any) -> Offer:
    """A rank whose tensors are at `step`; `None` if they are at none."""
    found = []
    if step is not None:
        at = Held(record(rank, step, size=size), True, 1, "model", "layout")
        found = [dataclasses.replace(at, **held)]
    return Offer(list(records), held.get("signature", "model"), True, 1, found)


def test_all_ranks_at_the_same_step_keep_their_own_state() -> None:
    found = choose([offer(rank, 5, record(rank, 5)) for rank in range(2)])
    assert found == Choice(5, "000000001-a", {}, [(0, record(0, 5)), (1, record(1, 5))])
    sent = json.loads(json.dumps(msgspec.to_builtins(found)))
    assert msgspec.convert(sent, Choice, str_keys=True) == found


def test_the_newest_step_is_used_if_each_rank_has_its_own_part_of_it() -> None:
    early = record(1, 6, final=False, passes=1)
    torn = offer(1, None, record(1, 5), early)
    found = choose([offer(0, 6, record(0, 5), record(0, 6)), torn])
    assert isinstance(found, Choice)
    assert (found.step, found.sources) == (6, {1: [0]})
    assert found.own[1] == (1, early)


@pytest.mark.parametrize("more", [{"settled": False}, {"passes": 2}])
def test_a_state_that_was_noted_early_must_have_been_the_last(more: dict[str, Any]) -> None:
    early = record(1, 6, final=False, passes=1)
    ahead, torn = (
        offer(0, 6, record(0, 5), record(0, 6), **more),
        offer(1, None, record(1, 5), early),
    )
    assert choose([ahead, dataclasses.replace(torn, why="in step 6")]) == (
        "step 6 lacks the random generators and other states of rank 1 alone; rank 1: in step 6"
    )
    # The other one is still at the step before: rank 0 goes back to it.
    found = choose([ahead, offer(1, 5, record(1, 5), early)])
    assert isinstance(found, Choice)
    assert (found.step, found.sources) == (5, {0: [1]})


def test_a_fault_that_came_back_may_be_due_to_the_state() -> None:
    offers = [
        offer(0, 5, record(0, 5)),
        dataclasses.replace(offer(1, 5, record(1, 5)), came_back=True),
    ]
    assert "the same fault came back" in str(choose(offers))


def test_no_state_is_missed_at_the_start_of_a_job() -> None:
    assert choose([offer(0, None), offer(1, None)]) == ""


def test_ranks_without_a_state_say_why() -> None:
    torn = [dataclasses.replace(offer(rank, None), why="step 61 had begun") for rank in range(2)]
    assert choose([*torn, offer(2, None)]) == "ranks 0, 1: step 61 had begun; rank 2: a new process"


def test_shards_without_a_copy_need_all_ranks() -> None:
    shards = [offer(r, 5, record(r, 5), signature=f"{r}") for r in range(2)]
    assert isinstance(choose(shards), Choice)
    assert choose([shards[0], dataclasses.replace(shards[1], held=[])]) == (
        "step 5 lacks the tensors of rank 1; rank 1: a new process"
    )


def test_a_job_of_another_size_needs_no_state_of_the_ranks_that_are_gone() -> None:
    left = [offer(0, 5, record(0, 5, size=3), size=3), offer(2, 5, record(2, 5, size=3), size=3)]
    found = choose(left)
    assert isinstance(found, Choice)
    assert found.own == [(0, record(0, 5, size=3)), (1, record(2, 5, size=3))]
    assert choose([left[0], dataclasses.replace(left[1], resizable=False)]) == (
        "step 5 lacks a state that fits 2 ranks instead of 3"
    )


def test_the_own_state_of_a_lost_host_comes_from_its_mirror() -> None:
    mirrored = [record(1, 4), record(1, 5), record(1, 6, final=False, passes=1)]
    holder = dataclasses.replace(offer(0, 5, record(0, 5)), mirrored=mirrored)
    found = choose([holder, offer(1, None)])
    assert isinstance(found, Choice)
    assert (found.step, found.sources) == (5, {1: [0]})
    assert found.own == [(0, record(0, 5)), (0, record(1, 5))]
    # What had not arrived is not used, nor an older state in its place.
    lags = dataclasses.replace(holder, mirrored=mirrored[:1])
    assert choose([lags, offer(1, None)]) == (
        "step 5 lacks the random generators and other states of rank 1 alone; rank 1: a new process"
    )


def test_a_process_has_not_the_state_that_it_mirrors() -> None:
    """In a job of another size, each keeps its own."""
    mirrored = [record(1, 5, size=3)]
    left = [offer(0, 5, record(0, 5, size=3), size=3), offer(2, 5, record(2, 5, size=3), size=3)]
    left[0] = dataclasses.replace(left[0], records=[], mirrored=mirrored)
    found = choose(left)
    assert isinstance(found, Choice)
    assert found.own == [(0, None), (1, record(2, 5, size=3))]


def test_states_of_different_branches_do_not_mix() -> None:
    other = dataclasses.replace(record(1, 5), branch="000000000-z")
    assert not isinstance(choose([offer(0, 5, record(0, 5)), offer(1, None, other)]), Choice)


def test_slots_keep_the_last_two_steps_and_the_coming_one() -> None:
    slots = Slots(100)
    for step in range(1, 9):
        for passes in (1, 2):
            slots.write(record(0, step, final=False, passes=passes), b"early %d" % step)
            if step > 2:
                kept = {(r.step, r.final) for r, _ in read(slots.memory)}
                assert {(step - 2, True), (step - 1, True), (step, False)} <= kept
        slots.write(record(0, step), b"state %d" % step)
    found = dict(read(slots.memory))
    assert found[record(0, 8)] == b"state 8"
    assert found[record(0, 7)] == b"state 7"
    assert not slots.write(record(0, 9), bytes(1 << 20))
    slots.memory.close()


def test_a_state_that_was_written_in_part_is_not_read() -> None:
    slots = Slots(100)
    slots.write(record(0, 1), b"state 1")
    at = bytes(slots.memory.view).index(b"state 1")
    slots.memory.view[at] ^= 1
    assert read(slots.memory) == []
    slots.memory.close()


def test_one_rank_reaches_all_others_in_few_rounds() -> None:
    found = list(rounds({rank: [0] for rank in range(1, 8)}))
    assert [len(each) for each in found] == [1, 2, 4]
    assert list(rounds({3: [0, 1, 2]})) == [{3: [0, 1, 2]}]


def in_phases(rank: int, *phases: tuple[int, int], own: Any = None) -> Offer:
    """A rank whose tensors are those of all these phases of step 5, as are its own states."""
    held = [
        Held(dataclasses.replace(record(rank, 5), phase=first, until=last), True, 1, "m", "l")
        for first, last in phases
    ]
    records = [dataclasses.replace(record(rank, 5), phase=a, until=b) for a, b in own or phases]
    return Offer(records, "m", True, 1, held)


@pytest.mark.parametrize(
    ("first", "second", "phase", "receives"),
    [
        # Each rank: the phases of its points. 0: stepped; 1: functions ended; 2: came back.
        ([(0, 2)], [(0, 2)], 2, []),
        ([(0, 1), (2, 2)], [(0, 1)], 1, []),  # the second one has not come back
        ([(0, 1), (2, 2)], [(0, 2)], 2, []),  # it has, and nothing had changed
        ([(0, 0), (1, 1), (2, 2)], [(0, 0)], 0, []),  # nor have its functions ended
        ([(0, 0), (1, 1), (2, 2)], [(0, 0), (1, 1)], 1, []),
        ([(2, 2)], [(0, 1)], 1, [0]),  # its body has changed the tensors: it receives the others
        ([(0, 1), (3, 3)], [(0, 1), (2, 2)], 1, []),  # it has left the loop, the other came back
    ],
)
def test_the_last_phase_that_all_ranks_have_is_used(
    first: list[tuple[int, int]], second: list[tuple[int, int]], phase: int, receives: list[int]
) -> None:
    for swapped in (False, True):
        kinds = [second, first] if swapped else [first, second]
        own = [[(0, 1)] if kind == [(2, 2)] else None for kind in kinds]
        offers = [in_phases(r, *kinds[r], own=own[r]) for r in range(2)]
        found = choose(offers)
        assert isinstance(found, Choice), found
        assert (found.step, found.phase) == (5, phase)
        assert sorted(found.sources) == [1 - r if swapped else r for r in receives]
        assert all(
            each is not None and each.has(State(5, phase, each.branch)) for _, each in found.own
        )


def test_a_rank_that_was_killed_has_the_phases_of_its_records() -> None:
    alive = in_phases(0, (0, 0), (1, 2))
    for of_killed, phase in [([(0, 0)], 0), ([(0, 0), (1, 1)], 1), ([(0, 0), (1, 2)], 2)]:
        killed = in_phases(1, own=of_killed)
        found = choose([alive, killed])
        assert isinstance(found, Choice)
        assert (found.phase, found.sources) == (phase, {1: [0]})
    early = Offer([record(1, 5, final=False, passes=1)], "m", True, 1)
    found = choose([alive, early])
    assert isinstance(found, Choice)
    assert found.phase == 0  # in the middle of a step, nothing is known of what follows it


def test_slots_keep_the_phases_of_the_last_step() -> None:
    slots = Slots(100)
    for step in range(1, 5):
        for phase in range(3):
            slots.write(dataclasses.replace(record(0, step), phase=phase, until=phase), b"state")
        slots.extend(3)
        before = {(r.step, r.phase, r.until) for r, _ in read(slots.memory)}
        assert step == 1 or (step - 1, 2, 3) in before
        slots.write(record(0, step + 1, final=False), b"early")
        slots.extend(3)  # not the early one
        slots.write(record(0, step + 1, final=False), b"early again")
        kept = {(r.step, r.phase, r.until) for r, _ in read(slots.memory) if r.final}
        assert {(step, 0, 0), (step, 1, 1), (step, 2, 3)} <= kept
        slots.write(record(0, step + 1), b"the next one")
        assert (step, 2, 3) in {(r.step, r.phase, r.until) for r, _ in read(slots.memory)}
    assert {r.until for r, _ in read(slots.memory) if not r.final} == {0}
    slots.memory.close()


def shards(rank: int, step: int, size: int = 2, *, copies: int = 1) -> Offer:
    """A rank that has its part of a sharded model; `copies` ranks have the same one."""
    alike = range(rank % (size // copies), size, size // copies)
    own = record(rank, step, size=size)
    return offer(rank, step, own, size=size, signature=f"part {rank}", stands_for=tuple(alike))


def found(*steps: int) -> dict[str, Any]:
    """The checkpoints on storage."""
    return {"candidates": [{"step": step} for step in steps]}


NEW = dataclasses.replace(offer(0, None), signature="another part")


def test_ranks_of_another_number_get_what_is_saved_of_all_shards() -> None:
    grown = [shards(0, 6), shards(1, 6), NEW]
    assert isinstance(choose(grown), str)
    saved = choose_to_reshard(grown, found(5))
    assert isinstance(saved, StateToSave)
    assert (saved.state.step, saved.holders, saved.lost) == (6, [0, 1], [])
    # Each shard has a second copy, and one of four ranks is lost: only its own state is.
    fewer = [shards(rank, 6, 4, copies=2) for rank in range(3)]
    saved = choose_to_reshard(fewer, found())
    assert isinstance(saved, StateToSave)
    assert (saved.holders, saved.lost) == ([0, 1, 2], [3])


@pytest.mark.parametrize(
    "offers",
    [
        [shards(0, 6), NEW],  # of the same size: the shards, and the generators, of rank 1 are lost
        [shards(0, 6, 2, copies=2), NEW],
        [shards(rank, 6, 4) for rank in range(3)],  # nobody else has those of rank 3
        [shards(0, 6), shards(1, 5), NEW],  # no step is complete on both
        [dataclasses.replace(shards(0, 6), came_back=True), shards(1, 6), NEW],
        [NEW, NEW],
    ],
)
def test_what_cannot_be_resharded(offers: list[Offer]) -> None:
    assert choose_to_reshard(offers, found()) is None


def test_a_checkpoint_of_the_same_step_is_loaded_without_another_save() -> None:
    assert choose_to_reshard([shards(0, 6), shards(1, 6), NEW], found(4, 6)) is None
