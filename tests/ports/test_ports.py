"""Training scripts of five kinds survive every fault, with the losses of an undisturbed run.

The examples run as a user starts them, with all defaults: a stopped process is replaced when the
hard timeout has expired, so the tests run at the same time, and mostly wait.
"""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from outlast import Checkpointer
from ports.port_run import Losses, PortRun

# The script, and its folder of checkpoints.
PORTS = {
    "nanogpt": (["nanogpt.py", "--max-iters", "240"], "out"),
    "ddp_trainer": (["ddp_trainer.py", "--epochs", "15"], "snapshots"),
    "accelerate_loop": (["accelerate_loop.py", "--epochs", "15"], "accelerate"),
    "hf_trainer": (["hf_trainer.py", "--max-steps", "240"], "hf/checkpoints"),
    "lightning_trainer": (["lightning_trainer.py", "--max-epochs", "15"], "lightning"),
}
# Loops of their own, as in `nanogpt`; `tests/integrations` tests accelerate too.
COVERED = ("ddp_trainer", "accelerate_loop")
INSTALLED = importlib.util.find_spec("lightning") and importlib.util.find_spec("transformers")
EXCEPTION = {"faults": [{"rank": 0, "kind": "exception", "step": 40}]}


@pytest.mark.skipif(not INSTALLED, reason="needs the extra `ports`: make test-ports")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "port",
    [
        pytest.param(port, marks=[pytest.mark.exhaustive] if port in COVERED else [])
        for port in PORTS
    ],
)
def test_a_port_survives_faults_and_stops_with_equal_losses(tmp_path: Path, port: str) -> None:
    script, checkpoints = PORTS[port]
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir()
    disturbed.mkdir()
    with PortRun(undisturbed, script) as run:
        assert run.wait() == 0, run.tail
        expected = run.losses()
    last = max(step for _, step in expected)
    assert set(expected) == {(rank, step) for rank in (0, 1) for step in range(1, last + 1)}

    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(EXCEPTION))
    with PortRun(disturbed, script, ["--chaos", str(plan)]) as run:
        run.wait_for_step(5)  # before the first scheduled checkpoint
        run.send(1, signal.SIGKILL)
        run.wait_for_text("rank 1 is now pid")
        run.wait_for_text("ChaosError")
        run.wait_for_step(45)
        run.send(1, signal.SIGSTOP)
        run.wait_for_text("rank 1 is now pid")
        run.wait_for_step(60)
        assert run.terminate() == 143, run.tail
        found = [run.losses()]
    with PortRun(disturbed, script) as run:
        run.wait_for_step(100)
        assert run.press_ctrl_c() in (130, 143), run.tail
        found.append(run.losses())
    with PortRun(disturbed, script) as run:
        assert run.wait() == 0, run.tail
        found.append(run.losses())
    assert different(expected, found) == {}
    assert same(final_state(undisturbed / checkpoints), final_state(disturbed / checkpoints))


def different(expected: Losses, found: list[Losses]) -> Losses:
    """The losses that some process printed, or that none did, unlike the undisturbed run.

    A rank may be killed after the collective of a step, and before it prints the loss. If another
    rank has completed the step, the replacement continues after it, and that loss is in no output.
    """
    merged: Losses = {key: set() for key in expected}
    for losses in found:
        for key, values in losses.items():
            merged.setdefault(key, set()).update(values)
    printed = {step for (_, step), values in merged.items() if values}
    return {
        (rank, step): values
        for (rank, step), values in merged.items()
        if values != expected.get((rank, step)) and (values or step not in printed)
    }


def final_state(checkpoints: Path) -> dict[str, Any]:
    """Model and optimizer in the newest checkpoint."""
    state: dict[str, Any] = {"model": {}, "optimizer": {}}
    with Checkpointer(checkpoints) as checkpointer:
        assert checkpointer.restore(state, strict=False)
    return state


def same(one: Any, other: Any) -> bool:
    """Whether two nested states are bit-identical."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)
