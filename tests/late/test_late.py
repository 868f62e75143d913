"""The device `late`, and what the product does on a device that runs behind its host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.live_trainings import Run, later, run
from late import device
from procs import Job

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # the extension takes a minute to build
Ranks = Callable[..., Job]


@pytest.fixture(scope="module", autouse=True)
def extension() -> None:
    """In other processes only: a process that has the device would use it in other tests too."""
    try:
        device.built()
    except device.NoCompilerError as e:
        pytest.skip(str(e))


@pytest.mark.parametrize("scenario", ["a_copy_needs_its_event", "a_training_is_that_of_the_cpu"])
def test_the_device(ranks: Ranks, scenario: str) -> None:
    with ranks("once", scenario, nprocs=1) as job:
        job.start_all()
        assert job.wait_all(60) == {0: 0}, job.errors(0)


@pytest.mark.parametrize("scenario", ["results_are_those_of_gloo", "the_host_runs_ahead"])
def test_the_process_group(ranks: Ranks, scenario: str) -> None:
    with ranks("group", scenario) as job:
        job.start_all()
        assert job.wait_all(60) == {0: 0, 1: 0}, job.errors(0) + job.errors(1)


def test_an_abort_alone_ends_a_collective_without_its_peer(ranks: Ranks) -> None:
    with ranks("group", "a_dead_peer_blocks_the_stream") as job:
        job.start_all()
        assert job.wait_all(60) == {0: 0, 1: -9}, job.errors(0) + job.errors(1)


def test_saves_have_the_state_of_their_moment(ranks: Ranks, tmp_path: Path) -> None:
    with ranks("once", "saves", str(tmp_path), nprocs=1) as job:
        job.start_all()
        assert job.wait_all(60) == {0: 0}, job.errors(0)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, zygote: Any) -> Run:
    folder = tmp_path_factory.mktemp("reference")
    script = Path(__file__).parent / "scripts" / "live.py"

    def ranks(_: str, plan: str, nprocs: int) -> Job:
        return Job(folder, script, nprocs=nprocs, args=[plan], spawn=zygote.spawn)

    return run(ranks, folder / "checkpoints")


@pytest.mark.parametrize("do", ["raise", "SIGKILL"])
@pytest.mark.parametrize("at", ["forward 5", "computed 5", "stepped 5", "done 5"])
def test_no_step_is_lost_on_a_device(
    ranks: Ranks, tmp_path: Path, reference: Run, at: str, do: str
) -> None:
    # The other rank is not within its step: for "computed", it waits for this one in the next.
    done = {"forward 5": 4, "computed 5": 4}.get(at, 5)
    faulty = run(ranks, tmp_path / "c", *later(1, done, at, do))
    assert {source for _, source in faulty.restored().values()} <= {"live", "replica"}
    assert {step for step, _ in faulty.restored().values()} == {done}
    wanted = reference.losses()  # not all are told: a rank may have received the state after it
    assert faulty.losses() == {key: wanted[key] for key in faulty.losses()}
    assert faulty.ended() == reference.ended()
