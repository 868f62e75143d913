"""torchtitan's checkpoint interface, optimizers and schedulers, on real ranks, through faults."""

from __future__ import annotations

import importlib.util
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

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


class LaterBase(ABC):
    """The part of torchtitan's interface after 0.3 that a manager of one's own meets."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        folder: str = "checkpoint"
        interval: int = 500
        initial_load_path: str | None = None
        initial_load_in_hf: bool = False
        last_save_model_only: bool = True
        last_save_in_hf: bool = False
        keep_latest_k: int = 10
        purge_exempt: Any = None
        exclude_from_loading: list[str] = field(default_factory=list)
        enable_first_step_checkpoint: bool = False
        load_only: bool = False

        def __post_init__(self) -> None:
            assert self.interval > 0

    def load(self, step: int = -1) -> bool:
        raise AssertionError("the search for a checkpoint in files of torchtitan")

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        with torch.no_grad():
            return bool(self._save(curr_step, last_step))

    def maybe_wait_for_saving(self) -> None:
        if getattr(self, "save_future", None) is not None:
            self._wait_for_saving()

    def close(self) -> None:
        try:
            self._maybe_wait_for_staging()
            self.maybe_wait_for_saving()
        finally:
            self._close()

    @abstractmethod
    def _wait_for_saving(self) -> None: ...
    @abstractmethod
    def _load_checkpoint(self, states: Any, checkpoint_id: str, **options: bool) -> None: ...
    @abstractmethod
    def _save(self, curr_step: int, last_step: bool = False) -> bool: ...
    @abstractmethod
    def _maybe_wait_for_staging(self) -> None: ...
    @abstractmethod
    def _close(self) -> None: ...
    @abstractmethod
    def _is_valid_checkpoint(self, checkpoint_dir: str) -> bool: ...
    @abstractmethod
    def _is_resumable_checkpoint(self, checkpoint_dir: str) -> bool: ...


class ModelWrapper:
    def __init__(self, parts: list[torch.nn.Module]) -> None:
        (self.model,) = parts

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.model.load_state_dict(state_dict, strict=False)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter, imported where torchtitan has the interface after 0.3."""
    base = types.ModuleType("torchtitan.components.checkpointer.base")
    vars(base).update(
        BaseCheckpointManager=LaterBase,
        DATALOADER="dataloader",
        LR_SCHEDULER="lr_scheduler",
        MODEL="model",
        ModelWrapper=ModelWrapper,
        OPTIMIZER="optimizer",
    )
    name = "outlast.integrations.torchtitan"
    for package in ("torchtitan", "torchtitan.components", "torchtitan.components.checkpointer"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    before = sys.modules.pop(name, None)
    yield importlib.import_module(name).OutlastCheckpointManager
    del sys.modules[name]
    if before is not None:
        sys.modules[name] = before


def test_the_interface_after_0_3_is_implemented_too(tmp_path: Path, later: Any) -> None:
    with pytest.raises(ValueError, match="does not support last_save_model_only, purge_exempt"):
        later.Config(purge_exempt=object())
    config = later.Config(interval=2, last_save_model_only=False)

    def made(weight: float) -> tuple[torch.nn.Linear, Any]:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, weight)
        nothing = dict.fromkeys(("dataloader", "optimizers", "lr_schedulers", "sd_adapter"))
        checkpoints = later(
            config, model_parts=[model], states={}, base_folder=str(tmp_path), **nothing
        )
        return model, checkpoints

    _, checkpoints = made(3)
    assert not checkpoints.load()
    assert [checkpoints.save(step) for step in (1, 2)] == [False, True]
    checkpoints.close()
    model, checkpoints = made(0)
    assert checkpoints.load(step=-1)
    assert model.weight.item() == 3
    checkpoints.close()
