"""torchtitan's checkpoint interface, optimizers and schedulers, on real ranks, through faults."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from integrations.faulty_runs import losses_of
from zygote import Zygote

SCRIPT = Path(__file__).parent / "scripts" / "torchtitan_training.py"
STEPS = 16
# Steps count from the start of an iteration.
FAULTS = [
    {"rank": 1, "iteration": 0, "step": 6, "kind": "exception"},
    {"rank": 0, "iteration": 1, "step": 3, "kind": "sigkill"},
]
INSTALLED = importlib.util.find_spec("torchtitan")


@pytest.mark.skipif(not INSTALLED, reason="needs the extra `torchtitan`")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_manager_restores_all_states_bit_by_bit(tmp_path: Path, zygote: Zygote) -> None:
    expected = losses_of(tmp_path / "undisturbed", SCRIPT, [], nprocs=2)
    # The last line of each rank is the hash of its part of the final weights.
    assert set(expected) == {(rank, step) for rank in (0, 1) for step in range(1, STEPS + 2)}
    found = losses_of(tmp_path / "disturbed", SCRIPT, [], nprocs=2, faults=FAULTS, stop_at=3)
    assert found == expected


@pytest.mark.skipif(not INSTALLED, reason="needs the extra `torchtitan`")
@pytest.mark.slow
def test_settings_that_it_does_not_support_are_refused_by_name() -> None:
    from outlast.integrations.torchtitan import OutlastCheckpointManager

    with pytest.raises(ValueError, match=r"does not support last_save_model_only, initial_load_in"):
        OutlastCheckpointManager.Config(enable=True, initial_load_in_hf=True)
    OutlastCheckpointManager.Config(enable=False)
