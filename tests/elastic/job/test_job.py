"""Jobs of real processes over gloo: no fault, signal or size changes what is learnt."""

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
    """Calls `check` with the simplest sequence and with one that the seed chooses, each with a
    name of its own and how many steps there are between saves. Nothing is shrunk: it takes long.
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
    """What the last stage says of the end; the same on all its ranks."""
    first, *others = training.stages[-1].said("ended")
    for other in others:
        other["committed"] = first["committed"]  # rank 0 removes what is old at any time
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("seed", [1, 3])
def test_the_same_bits_at_any_sizes_with_any_faults(trainings: Made, seed: int) -> None:
    """Under `ConsistentDDP`."""
    whole = trainings("whole", virtual=6)
    whole.run(1 + seed)
    one = whole.lineage()

    def check(name: str, stages: list[Stage], every: int) -> None:
        faulty = trainings(name, virtual=6, every=every)
        run(faulty, stages)
        other = faulty.lineage()
        check_exactly_once(other, 90, 16)
        for step in range(1, STEPS + 1):
            assert samples(one[step]) == samples(other[step])
            assert parts(one[step]) == parts(other[step])
        for what in ("steps", "samples", "weights", "moments"):
            assert ended(whole)[what] == ended(faulty)[what]

    for_sequences(seed, (1, 6), check)


@pytest.mark.parametrize(("seed", "size"), [(4, 2), (5, 3)])
def test_the_same_bits_at_a_constant_size(trainings: Made, seed: int, size: int) -> None:
    """Under plain DDP, with dropout and gradients that are accumulated."""
    plan = {"max_batch": 5, "unused": size > 2}
    whole = trainings("whole", **plan)
    whole.run(size)

    def check(name: str, stages: list[Stage], every: int) -> None:
        faulty = trainings(name, every=every, **plan)
        run(faulty, stages)
        check_exactly_once(faulty.lineage(), 90, 16)
        assert faulty.lineage() == whole.lineage(), "samples and losses, rank by rank"
        for what in ("steps", "samples", "weights", "moments"):
            assert ended(whole)[what] == ended(faulty)[what]

    for_sequences(seed, (size, size), check)


def test_the_same_losses_under_plain_ddp_at_other_sizes(trainings: Made) -> None:
    whole = trainings("whole", dropout=0.0)
    whole.run(1)
    one = whole.lineage()

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


def test_workers_that_fetch_ahead_and_batch_norm_of_virtual_replicas(trainings: Made) -> None:
    plan = {"virtual": 3, "drop_last": True, "batch": 18, "workers": 1, "epochs": 2}
    whole, faulty = trainings("whole", **plan), trainings("faulty", **plan)
    whole.run(1)
    faulty.run(3, fault("SIGTERM", 3, 1))
    faulty.run(2)
    assert ended(whole)["weights"] == ended(faulty)["weights"]
    assert ended(whole)["moments"] == ended(faulty)["moments"]


@pytest.mark.parametrize(
    ("what", "when"),
    [("stop", "before"), ("SIGTERM", "before"), ("save", "after")],
)
def test_told_on_one_rank_all_stop_after_one_step(trainings: Made, what: str, when: str) -> None:
    training = trainings(every=4)
    faults = fault(what, 4, 1, when=when)
    if what == "save":  # of all ranks, and the signal comes in the middle of it
        faults += [*fault(what, 4, 0, when=when), *fault("SIGTERM", 4, 1, when=when)]
    stage = training.run(2, faults)
    assert set(stage.codes.values()) == {143}, stage.errors
    (step,) = {max(line["step"] for line in lines if "step" in line) for lines in stage.lines}
    assert 4 <= step <= 7
    why = "the machine goes" if what == "stop" else "signal SIGTERM"
    for errors in stage.errors:
        assert f"stopping after step {step}: rank 1 on " in errors
        assert f": {why}" in errors
    assert training.run(3).begun_from == step


def test_the_second_signal_does_not_wait(trainings: Made) -> None:
    training = trainings()
    stage = training.run(2, fault("twice", 6, 0), killed=True)
    assert stage.codes == {0: -15, 1: -9}
    assert training.run(1).begun_from in (0, 4), "whatever was committed by then"


def test_time_says_when_to_save(trainings: Made) -> None:
    training = trainings(every=1e-6)
    stage = training.run(2)
    assert set(stage.codes.values()) == {0}, stage.errors
    assert ended(training)["committed"][-1] == STEPS
    training = trainings("never", every=3600.0)
    assert set(training.run(2).codes.values()) == {0}
    assert ended(training)["committed"] == [0], "the beginning, which nothing has replaced"
    assert training.run(1).begun_from == STEPS, "the end of the block has saved"


@pytest.mark.parametrize("bad_on", [[0, 1], [1]])
def test_a_state_that_cannot_be_loaded(trainings: Made, bad_on: list[int]) -> None:
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
            assert refused["message"].startswith("rank 1 could not load its state")
        assert refused["same"], "the weights are as they were"
        assert refused["states"] == {name: [value, [0.0] * 3] for name, value in new.items()}
        assert after == {"event": "after", "steps": 0, "place": [0, 0], "optimizer": 0}


def test_data_in_another_order_are_refused_and_nothing_is_changed(trainings: Made) -> None:
    training = trainings()
    training.run(2, fault("SIGTERM", 5, 0))
    for plan, says in (({"seed": 6}, "seed is 6, 5 was saved"), ({"samples": 91}, "length is 91")):
        stage = training.run(2, **plan)
        for refused, after in zip(stage.said("refused"), stage.said("after"), strict=True):
            assert refused["type"] == "ValueError"
            assert says in refused["message"]
            assert refused["same"]
            assert after["place"] == [0, 0]


def test_states_that_are_added_and_removed(trainings: Made) -> None:
    training = trainings(states={"kept": 1, "removed": 2})
    training.run(2, fault("SIGTERM", 5, 0))
    stage = training.run(1, states={"kept": 7, "added": 8})
    assert stage.codes == {0: 0}, stage.errors
    assert stage.said("restored")[0]["states"] == {"kept": 1, "added": 8}
    assert trainings().run(1, states={}).codes == {0: 0}


def test_fsdp_is_resharded(trainings: Made) -> None:
    training = trainings(sharded=True)
    assert set(training.run(4, fault("SIGTERM", 3, 2)).codes.values()) == {143}
    # Two, killed before they save, and one find the same.
    stages = [training.run(2, fault("SIGKILL", 1, 0), killed=True, every=100)]
    stages.append(training.run(1))
    assert stages[1].codes == {0: 0}, stages[1].errors
    for what in ("weights", "moments", "step"):
        assert len({str(stage.said("restored")[0][what]) for stage in stages}) == 1
    check_exactly_once(training.lineage(), 90, 16)


def test_the_beginning_is_found_again_by_a_job_of_shards(trainings: Made) -> None:
    whole = trainings("whole", sharded=True)
    whole.run(2)
    training = trainings(sharded=True)
    training.run(2, fault("SIGKILL", 1, 1), killed=True)
    assert training.run(2).begun_from == 0
    assert ended(training)["weights"] == ended(whole)["weights"]
