"""The device `late`, and what the product does on a device that runs behind its host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.live_trainings import Run, fault, later, run
from late import device
from procs import Job

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # the extension takes a minute to build
Ranks = Callable[..., Job]
MEMORY = ("live", "replica")


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


TIMEOUTS = {"soft_timeout": 4, "hard_timeout": 6, "termination_grace_time": 1}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, zygote: Any) -> Callable[..., Run]:
    """The run of a plan without faults, which is made once."""
    script = Path(__file__).parent / "scripts" / "live.py"
    made: dict[str, Run] = {}

    def undisturbed(nprocs: int = 2, **plan: Any) -> Run:
        name = repr((nprocs, plan))
        if name not in made:
            folder = tmp_path_factory.mktemp("undisturbed")

            def ranks(_: str, plan: str, nprocs: int) -> Job:
                return Job(folder, script, nprocs=nprocs, args=[plan], spawn=zygote.spawn)

            made[name] = run(ranks, folder / "checkpoints", nprocs=nprocs, **plan)
        return made[name]

    return undisturbed


def check(faulty: Run, reference: Run, *steps: int, sources: tuple[str, ...] = MEMORY) -> None:
    """All ranks continue from one of these steps; every bit is that of the run without faults."""
    found = faulty.restored().values()
    assert {source for _, source in found} <= set(sources), faulty.errors
    assert len({step for step, _ in found}) == 1, faulty.errors
    assert {step for step, _ in found} <= set(steps), faulty.errors
    wanted = reference.losses()  # not all are told: a rank may have received the state after it
    assert faulty.losses() == {key: wanted[key] for key in faulty.losses()}
    assert faulty.ended() == reference.ended()


@pytest.mark.parametrize("do", ["raise", "SIGKILL"])
@pytest.mark.parametrize(
    ("at", "steps"),
    [
        ("forward 5", [4]),
        ("reducing 5", [4]),
        ("computed 5", [4, 5]),  # the other rank may have all gradients, and complete the step
        ("stepped 5", [5]),
        ("done 5", [5]),
    ],
)
def test_no_step_is_lost_on_a_device(
    ranks: Ranks, tmp_path: Path, undisturbed: Any, at: str, steps: list[int], do: str
) -> None:
    faulty = run(ranks, tmp_path / "c", *later(1, steps[0], at, do))
    check(faulty, undisturbed(), *steps)


def ahead(at: str, do: str, nprocs: int = 2) -> list[dict[str, Any]]:
    """A fault of rank 1 when the hosts of the others are as far ahead of step 5 as they get. Their
    streams wait for the gradients of rank 1, which never come.
    """
    others = [other for other in range(nprocs) if other != 1]
    marks = [fault(other, "computed 5", f"mark ahead {other}") for other in others]
    waits = [f"await ahead {other}" for other in others]
    return [*marks, fault(1, at, ", ".join([*waits, "pause", do]))]


@pytest.mark.parametrize("do", ["raise", "SIGKILL"])
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_hosts_ahead_of_gradients_that_never_come(
    ranks: Ranks, tmp_path: Path, undisturbed: Any, options: dict[str, Any], do: str
) -> None:
    plan = {"optimizer": options}
    faulty = run(ranks, tmp_path / "c", *ahead("forward 5", do), **plan)
    # A survivor whose optimizer has not begun needs nothing from another rank.
    check(faulty, undisturbed(**plan), 4, sources=("live",) if do == "raise" else MEMORY)


@pytest.mark.parametrize("do", ["stay", "SIGSTOP"])
@pytest.mark.parametrize(("at", "steps"), [("forward 5", [4]), ("computed 5", [4, 5])])
def test_a_rank_that_hangs(
    ranks: Ranks, tmp_path: Path, undisturbed: Any, at: str, steps: list[int], do: str
) -> None:
    faulty = run(ranks, tmp_path / "c", *later(1, steps[0], at, do), timeouts=TIMEOUTS)
    check(faulty, undisturbed(), *steps)


@pytest.mark.parametrize(
    ("at", "steps", "do"),
    [("reducing 5", [4], "raise"), ("computed 5", [4, 5], "SIGKILL"), ("stepped 5", [5], "raise")],
)
def test_four_ranks(
    ranks: Ranks, tmp_path: Path, undisturbed: Any, at: str, steps: list[int], do: str
) -> None:
    plan = {"nprocs": 4, "optimizer": {"fused": True}}
    faulty = run(ranks, tmp_path / "c", *later(1, steps[0], at, do, nprocs=4), **plan)
    check(faulty, undisturbed(**plan), *steps)


@pytest.mark.parametrize("do", ["raise", "SIGKILL"])
@pytest.mark.parametrize(
    ("at", "steps"), [("computed 5", [4]), ("computed 5 1", [4, 5]), ("stepped 5", [5])]
)
def test_accumulated_gradients_and_an_average(
    ranks: Ranks, tmp_path: Path, undisturbed: Any, at: str, steps: list[int], do: str
) -> None:
    plan = {"micro": 2, "ema": True}
    faulty = run(ranks, tmp_path / "c", *later(1, steps[0], at, do), **plan)
    check(faulty, undisturbed(**plan), *steps)


@pytest.mark.parametrize("do", ["raise", "SIGKILL"])
@pytest.mark.parametrize("at", ["forward 5", "done 5"])
@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_a_sharded_model(
    ranks: Ranks, tmp_path: Path, undisturbed: Any, kind: str, at: str, do: str
) -> None:
    """Each point is one at which all ranks have completed the same step. A shard that dies with its
    rank, and of which there is no replica, is in the last checkpoint only.
    """
    plan = {"nprocs": 4 if kind == "hsdp" else 2, "kind": kind, "every": 3}
    done = 4 if at == "forward 5" else 5
    faulty = run(ranks, tmp_path / "c", *later(1, done, at, do, nprocs=plan["nprocs"]), **plan)
    if (kind, do) == ("fsdp", "SIGKILL"):
        check(faulty, undisturbed(**plan), 3, sources=("memory",))
    else:
        check(faulty, undisturbed(**plan), done)


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_a_torn_step_of_a_sharded_model(
    ranks: Ranks, tmp_path: Path, undisturbed: Any, kind: str
) -> None:
    """The optimizer has begun the step on one rank: none of its replicas may have completed it, and
    the checkpoint is as good as its interval.
    """
    plan = {"nprocs": 4 if kind == "hsdp" else 2, "kind": kind, "every": 3}
    faulty = run(ranks, tmp_path / "c", *later(1, 4, "stepped 5", "raise", plan["nprocs"]), **plan)
    check(faulty, undisturbed(**plan), 3, 5, sources=(*MEMORY, "memory"))
