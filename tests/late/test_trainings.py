"""Trainings on the device `late`: faults when the device is behind its host."""

from __future__ import annotations

import contextlib
import functools
import re
from pathlib import Path
from typing import Any

import pytest

from elastic.live_trainings import Ranks, fault, later, run
from late.trainings import MEMORY, ahead, check
from outlast.system.lease_page import HostPage

pytestmark = pytest.mark.slow


KILLED = pytest.param("SIGKILL", marks=pytest.mark.exhaustive)
TIMEOUTS = {"soft_timeout": 4, "hard_timeout": 6, "termination_grace_time": 1}


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


@pytest.mark.parametrize("do", ["raise", KILLED])
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_hosts_ahead_of_gradients_that_never_come(
    ranks: Ranks, tmp_path: Path, undisturbed: Any, options: dict[str, Any], do: str
) -> None:
    plan = {"optimizer": options}
    faulty = run(ranks, tmp_path / "c", *ahead("forward 5", do), **plan)
    # A survivor whose optimizer has not begun needs nothing from another rank.
    check(faulty, undisturbed(**plan), 4, sources=("live",) if do == "raise" else MEMORY)


@pytest.mark.parametrize("untold", [False, True])
@pytest.mark.parametrize("launcher", [False, True])
def test_gradients_that_the_abort_of_a_peer_has_ended(
    ranks: Ranks, tmp_path: Path, undisturbed: Any, *, launcher: bool, untold: bool
) -> None:
    """The abort of rank 1 ends the collectives of rank 0 with garbage, and rank 0 hears of the
    restart only then. With a launcher, it asks the store once, and looks at the launcher's page
    after that; the garbage is in its state if rank 1 has not said there that it aborts.
    """
    page = HostPage()
    if launcher:
        ranks = functools.partial(ranks, env={"OUTLAST_READ_LEASE": str(page.path)})
    steps = fault(0, "stepped 5", "stepped", always=True)
    faults = [*ahead("forward 5", "raise"), steps]
    found = pytest.raises(AssertionError) if launcher and untold else contextlib.nullcontext()
    with found:
        faulty = run(ranks, tmp_path / "c", *faults, deaf=True, untold=untold)
        check(faulty, undisturbed(), 4, sources=("live",))
    page.close()


@pytest.mark.parametrize("do", [pytest.param("raise", marks=pytest.mark.exhaustive), "SIGKILL"])
@pytest.mark.exhaustive
def test_a_step_that_is_left_out_because_of_garbage(
    ranks: Ranks, tmp_path: Path, undisturbed: Any, do: str
) -> None:
    """What the abort leaves looks like a spike. The optimizer does not step, and the state of step
    4 must not be noted as that of step 5, of which rank 1 has noted its own part.
    """
    faults = [*ahead("reducing 5", do), fault(0, "noted 5", "stepped, stay")]
    faulty = run(ranks, tmp_path / "c", *faults, guard=True, deaf=do == "raise")
    check(faulty, undisturbed(guard=True), 4)


@pytest.mark.parametrize(("waits", "source"), [("0", "live"), ("1", "memory")])
def test_a_state_that_torch_may_have_aborted_is_not_continued(
    ranks: Ranks, tmp_path: Path, undisturbed: Any, waits: str, source: str
) -> None:
    """With `TORCH_NCCL_BLOCKING_WAIT`, torch aborts before a rank knows of the fault."""
    ranks = functools.partial(ranks, env={"TORCH_NCCL_BLOCKING_WAIT": waits})
    plan = {"every": 4, "nccl": True}
    faulty = run(ranks, tmp_path / "c", *later(1, 4, "forward 6", "raise"), **plan)
    steps = {"live": 5, "memory": 4}
    check(faulty, undisturbed(every=4), steps[source], sources=(source,))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_save_of_what_the_device_has_not_computed(
    ranks: Ranks, tmp_path: Path, undisturbed: Any, overlap: bool
) -> None:
    """Without live state, both hosts save step 5 before its gradients are reduced, which the abort
    ends with garbage.
    """
    faults = [fault(1, "forward 5", "hold"), fault(0, "stepped 5", "mark there")]
    faults.append(fault(1, "noted 5", "await there, raise"))
    plan = {"every": 1, "job": {"live": False, "overlap": overlap}}
    faulty = run(ranks, tmp_path / "c", *faults, **plan)
    check(faulty, undisturbed(**plan), 4, 5, sources=("memory", "storage"))


@pytest.mark.parametrize("do", ["raise", pytest.param("SIGKILL", marks=pytest.mark.exhaustive)])
@pytest.mark.exhaustive
def test_a_metric_that_is_reduced_after_the_optimizers_step(
    ranks: Ranks, tmp_path: Path, undisturbed: Any, do: str
) -> None:
    """The sum of rank 0 waits for rank 1, and the abort leaves garbage in it: none has step 5."""
    plan = {"metric": True, "every": 3}
    faults = [*ahead("stepped 5", do, when="measured 5"), fault(0, "noted 5", "stepped, stay")]
    faulty = run(ranks, tmp_path / "c", *faults, deaf=do == "raise", **plan)
    check(faulty, undisturbed(**plan), 3, sources=("memory",))


@pytest.mark.parametrize("do", ["raise", KILLED])
def test_a_rank_uses_no_device_of_another_one(ranks: Ranks, tmp_path: Path, do: str) -> None:
    """Of rank 1, whose device is the second, no thread does anything on the first."""
    plan = {"own_device": True, "every": 1}
    faulty = run(ranks, tmp_path / "c", *later(0, 4, "forward 5", do), **plan)
    for line in faulty.events("contexts"):
        assert re.fullmatch(rf"{line['of']} by \d+ \S+", line["opened"]), faulty.errors


@pytest.mark.parametrize("do", ["stay", "SIGSTOP"])
@pytest.mark.parametrize(("at", "steps"), [("forward 5", [4]), ("computed 5", [4, 5])])
def test_a_rank_that_hangs(
    ranks: Ranks, tmp_path: Path, undisturbed: Any, at: str, steps: list[int], do: str
) -> None:
    faulty = run(ranks, tmp_path / "c", *later(1, steps[0], at, do), timeouts=TIMEOUTS)
    check(faulty, undisturbed(), *steps)
    assert "restart of iteration 0: rank 1 " in faulty.errors  # rank 0 met its abort


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


@pytest.mark.parametrize("do", ["raise", KILLED])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("step", [2, 7])
def test_a_scaler_that_skips_steps(
    ranks: Ranks, tmp_path: Path, undisturbed: Any, step: int, fused: bool, do: str
) -> None:
    """It skips step 2, whose gradients are infinite, and makes step 7."""
    plan = {"scaler": True, "optimizer": {"fused": fused}}
    scales = {line["step"]: line["scale"] for line in undisturbed(**plan).events("trained")}
    assert (scales[2] < scales[1], scales[7] < scales[6]) == (True, False)
    faulty = run(ranks, tmp_path / "c", *later(1, step, f"stepped {step}", do), **plan)
    check(faulty, undisturbed(**plan), step)


@pytest.mark.parametrize("do", ["raise", KILLED])
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
