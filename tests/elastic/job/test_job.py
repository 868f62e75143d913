"""`Job` in real processes over gloo: faults, signals and resizing do not change the result."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from elastic.trainings import (
    Fault,
    Trainings,
    check_exactly_once,
    check_same_losses,
    fault,
    parts,
    samples,
)
from procs import Job
from zygote import Zygote

Made = Callable[..., Trainings]
Stage = tuple[int, list[Fault], bool]  # size, faults, whether one of them kills
SCRIPT = Path(__file__).parents[1] / "scripts" / "trains.py"
STEPS = 12  # of the two epochs of `trains.py`


@pytest.fixture
def trainings(zygote: Zygote, tmp_path: Path) -> Made:
    def ranks(arguments: str, nprocs: int) -> Job:
        return Job(tmp_path, SCRIPT, nprocs=nprocs, args=[arguments], spawn=zygote.spawn)

    def made(name: str = "checkpoints", **plan: Any) -> Trainings:
        return Trainings(ranks, tmp_path / name, **plan)

    return made


@st.composite
def sequences(draw: st.DrawFn, sizes: tuple[int, int]) -> list[Stage]:
    """Sizes, save points and faults of the stages before the last one, which goes to the end."""
    stages = []
    step = 0
    for _ in range(2):
        size = draw(st.integers(*sizes))
        step += draw(st.integers(1, 4))
        what = draw(st.sampled_from(["SIGTERM", "SIGUSR1", "SIGKILL", "stop"]))
        most = 1 if what == "SIGKILL" else size
        ranks = st.lists(st.integers(0, size - 1), min_size=1, max_size=most, unique=True)
        when = draw(st.sampled_from(["before", "after"]))
        stages.append((size, fault(what, step, *draw(ranks), when=when), what == "SIGKILL"))
    return [*stages, (draw(st.integers(*sizes)), [], False)]


def for_sequences(seed: int, sizes: tuple[int, int], check: Callable[..., None]) -> None:
    """Calls `check` with the simplest sequence and with one that the seed chooses, a unique name
    and the number of steps between saves. Failures are not shrunk: that takes too long.
    """
    names = (f"faulty{number}" for number in itertools.count())

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=2, database=None, phases=[hypothesis.Phase.generate])
    @hypothesis.given(sequences(sizes), st.integers(1, 4))
    def checked(stages: list[Stage], every: int) -> None:
        check(next(names), stages, every=every)

    checked()


def run(training: Trainings, stages: list[Stage]) -> None:
    for size, faults, killed in stages:
        stage = training.run(size, faults, killed=killed)
        if killed:
            assert -9 in stage.codes.values()
        elif faults:
            assert set(stage.codes.values()) == {143}, stage.errors
        else:
            assert set(stage.codes.values()) == {0}, stage.errors


def ended(training: Trainings) -> dict[str, Any]:
    """The "ended" event of the last stage; the same on all its ranks."""
    first, *others = training.stages[-1].said("ended")
    for other in others:
        other["committed"] = first["committed"]  # rank 0 may remove an old checkpoint at any time
    assert all(other == first for other in others)
    return first


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 3])
def test_bit_identical_at_any_world_size_with_any_fault(trainings: Made, seed: int) -> None:
    """Under `ConsistentDDP`."""
    reference = trainings("reference", virtual=6)
    reference.run(1 + seed)
    one = reference.lineage()

    def check(name: str, stages: list[Stage], every: int) -> None:
        faulty = trainings(name, virtual=6, every=every)
        run(faulty, stages)
        other = faulty.lineage()
        check_exactly_once(other, 90, 16)
        for step in range(1, STEPS + 1):
            assert samples(one[step]) == samples(other[step])
            assert parts(one[step]) == parts(other[step])
        for what in ("steps", "samples", "weights", "moments"):
            assert ended(reference)[what] == ended(faulty)[what]

    for_sequences(seed, (1, 6), check)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "size"), [(4, 2), (5, 3)])
def test_bit_identical_at_a_constant_world_size(trainings: Made, seed: int, size: int) -> None:
    """Under plain DDP, with dropout and gradient accumulation; its buckets have another order after
    its first pass, which three ranks keep.
    """
    plan = {"max_batch": 5}
    reference = trainings("reference", **plan)
    reference.run(size)

    def check(name: str, stages: list[Stage], every: int) -> None:
        faulty = trainings(name, every=every, **plan)
        run(faulty, stages)
        check_exactly_once(faulty.lineage(), 90, 16)
        assert faulty.lineage() == reference.lineage(), "samples and losses, rank by rank"
        for what in ("steps", "samples", "weights", "moments"):
            assert ended(reference)[what] == ended(faulty)[what]

    for_sequences(seed, (size, size), check)


@pytest.mark.slow
def test_the_same_losses_under_plain_ddp_at_any_world_size(trainings: Made) -> None:
    reference = trainings("reference", dropout=0.0)
    reference.run(1)
    one = reference.lineage()

    def check(name: str, stages: list[Stage], every: int) -> None:
        faulty = trainings(name, dropout=0.0, every=every)
        run(faulty, stages)
        other = faulty.lineage()
        check_exactly_once(other, 90, 16)
        assert {step: samples(said) for step, said in one.items()} == {
            step: samples(said) for step, said in other.items()
        }
        check_same_losses(one, other, averaged=True)

    for_sequences(6, (1, 6), check)


@pytest.mark.slow
def test_prefetching_workers_and_batch_norm_of_virtual_replicas(trainings: Made) -> None:
    plan = {"virtual": 3, "drop_last": True, "batch": 18, "workers": 1, "epochs": 2}
    reference, faulty = trainings("reference", **plan), trainings("faulty", **plan)
    reference.run(1)
    faulty.run(3, fault("SIGTERM", 3, 1))
    faulty.run(2)
    assert ended(reference)["weights"] == ended(faulty)["weights"]
    assert ended(reference)["moments"] == ended(faulty)["moments"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "when"),
    [
        ("SIGTERM", "before"),
        ("stop", "before"),
        ("save", "after"),
    ],
)
def test_a_request_on_one_rank_stops_all_after_the_same_step(
    trainings: Made, what: str, when: str
) -> None:
    training = trainings(every=4)
    faults = fault(what, 4, 1, when=when)
    if what == "save":  # on all ranks; the signal arrives during the save
        faults += [*fault(what, 4, 0, when=when), *fault("SIGTERM", 4, 1, when=when)]
    stage = training.run(2, faults)
    assert set(stage.codes.values()) == {143}, stage.errors
    (step,) = {max(line["step"] for line in lines if "step" in line) for lines in stage.lines}
    assert 4 <= step <= 7
    why = "the machine goes" if what == "stop" else "signal SIGTERM"
    assert f"stopping after step {step}: rank 1 on " in stage.errors[0]
    assert f": {why}" in stage.errors[0]
    assert "stopping after" not in stage.errors[1]  # one rank says it for all
    assert training.run(3).start_step == step


@pytest.mark.slow
def test_the_second_interrupt_ends_the_process_at_once(trainings: Made) -> None:
    training = trainings()
    stage = training.run(2, fault("twice", 6, 0), killed=True)
    assert stage.codes == {0: -2, 1: -9}
    assert training.run(1).start_step in (0, 4), "whichever was committed by then"


@pytest.mark.slow
def test_saves_by_time(trainings: Made) -> None:
    training = trainings(every=1e-6)
    stage = training.run(2)
    assert set(stage.codes.values()) == {0}, stage.errors
    assert ended(training)["committed"][-1] == STEPS
    training = trainings("never", every=3600.0)
    assert set(training.run(2).codes.values()) == {0}
    assert ended(training)["committed"] == [0], "the initial state"
    assert training.run(1).start_step == STEPS, "saved at the end of the block"


@pytest.mark.parametrize("bad_on", [pytest.param([0, 1], marks=pytest.mark.slow), [1]])
def test_all_ranks_raise_if_one_cannot_load_a_state(trainings: Made, bad_on: list[int]) -> None:
    training = trainings(states={"good": 1, "bad": 2, "other": 3}, bad_on=[])
    assert set(training.run(2, fault("SIGTERM", 5, 0)).codes.values()) == {143}
    new = {"good": 4, "bad": 5, "other": 6}
    stage = training.run(2, states=new, bad_on=bad_on, seed=5)
    for rank, (refused, after) in enumerate(
        zip(stage.said("refused"), stage.said("after"), strict=True)
    ):
        assert refused["type"] == "CheckpointError"
        if rank in bad_on:
            assert refused["message"] == "the state 'bad' could not be loaded: it does not fit"
        else:
            assert refused["message"].startswith("the state could not be loaded on rank 1")
        assert refused["same"], "the weights are unchanged"
        assert refused["states"] == {name: [value, [0.0] * 3] for name, value in new.items()}
        assert after == {"event": "after", "steps": 0, "place": [0, 0], "optimizer": 0}


@pytest.mark.slow
def test_samples_in_another_order_are_refused_and_nothing_is_changed(trainings: Made) -> None:
    training = trainings()
    training.run(2, fault("SIGTERM", 5, 0))
    for plan, says in (({"seed": 6}, "seed is 6, 5 was saved"), ({"samples": 91}, "length is 91")):
        stage = training.run(2, **plan)
        for refused, after in zip(stage.said("refused"), stage.said("after"), strict=True):
            assert refused["type"] == "ValueError"
            assert says in refused["message"]
            assert refused["same"]
            assert after["place"] == [0, 0]


def test_states_can_be_added_and_removed(trainings: Made) -> None:
    training = trainings(states={"kept": 1, "removed": 2})
    training.run(2, fault("SIGTERM", 5, 0))
    stage = training.run(1, states={"kept": 7, "added": 8})
    assert stage.codes == {0: 0}, stage.errors
    assert stage.said("restored")[0]["states"] == {"kept": 1, "added": 8}
    assert trainings().run(1, states={}).codes == {0: 0}


@pytest.mark.slow
def test_fsdp_state_is_resharded(trainings: Made) -> None:
    training = trainings(sharded=True)
    assert set(training.run(4, fault("SIGTERM", 3, 2)).codes.values()) == {143}
    # Two ranks, killed before they save, and then one rank restore the same state.
    stages = [training.run(2, fault("SIGKILL", 1, 0), killed=True, every=100)]
    stages.append(training.run(1))
    assert stages[1].codes == {0: 0}, stages[1].errors
    for what in ("weights", "moments", "step"):
        assert len({str(stage.said("restored")[0][what]) for stage in stages}) == 1
    check_exactly_once(training.lineage(), 90, 16)


@pytest.mark.slow
def test_a_sharded_job_goes_back_to_the_initial_state(trainings: Made) -> None:
    reference = trainings("reference", sharded=True)
    reference.run(2)
    training = trainings(sharded=True)
    training.run(2, fault("SIGKILL", 1, 1), killed=True)
    assert training.run(2).start_step == 0
    assert ended(training)["weights"] == ended(reference)["weights"]
