"""Programs of the shape of nvidia-resiliency-ext's examples survive an exception and a SIGKILL."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ports.port_run import PortRun

SCRIPT = str(Path(__file__).parent / "nvrx_examples.py")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("example", ["basic", "advanced"])
def test_an_example_survives_faults_with_equal_losses(tmp_path: Path, example: str) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir()
    disturbed.mkdir()
    (undisturbed / "go").touch()
    with PortRun(undisturbed, [SCRIPT, example, "undisturbed"]) as run:
        assert run.wait() == 0, run.tail
        expected = run.losses()
    assert set(expected) == {(rank, step) for rank in (0, 1) for step in range(1, 61)}
    with PortRun(disturbed, [SCRIPT, example]) as run:
        run.wait_for_text("an example fault")
        run.wait_for_step(12)
        run.send(1, signal.SIGKILL)
        run.wait_for_text("rank 1 is now pid")
        run.wait_for_step(41)
        (disturbed / "go").touch()
        assert run.wait() == 0, run.tail
        found = run.losses()
    assert found == expected
