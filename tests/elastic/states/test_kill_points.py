"""A save killed at any point leaves either the old or the new checkpoint, complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.states.test_saving import names_in
from elastic.text_state import Text
from outlast.elastic import load_all_states, save_all_states
from procs import Job

Ranks = Callable[..., Job]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asynchronous", "stride"),
    [
        ("yes", 2),
        pytest.param("yes", 1, marks=pytest.mark.exhaustive),
        pytest.param("", 1, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.exhaustive
def test_every_point_at_which_a_save_can_be_killed(
    ranks: Ranks, folder: Path, tmp_path: Path, asynchronous: str, stride: int
) -> None:
    """A child process saves and is killed at its first kill point, then at one `stride` later, and
    so on, until one completes.
    """
    states = [Text("a", "old"), Text("b", "old")]
    outcomes = []
    told = tmp_path / "other.told"  # the program has been told that its save is committed
    killed_after = 0
    for point in range(0, 1000, stride):
        for state in states:
            state.text = "old"
        save_all_states()  # also removes leftovers of the previous kill
        assert len(names_in(folder)) == 1
        with ranks("killed", str(point), asynchronous, str(tmp_path / "other"), nprocs=1) as job:
            job.start_all()
            code = job.wait(0)
        for state in states:
            state.text = "neither"
        assert load_all_states() == ["a", "b"]
        found = {state.text for state in states}
        assert found in ({"old"}, {"new"})
        outcomes.append(found.pop())
        if told.exists():
            told.unlink()
            assert outcomes[-1] == "new"
            killed_after += code != 0
        if code == 0:
            break
        assert code == -9, job.errors(0)
    assert outcomes[-1] == "new"
    # Before that, the writer process commits beside the program: of two points, the later one may
    # be reached earlier.
    assert killed_after > (1 if stride == 1 else 0)
    assert stride * outcomes.count("old") > 10
    assert outcomes.count("new") > 1
