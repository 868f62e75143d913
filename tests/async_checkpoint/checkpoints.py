"""Shared by the checkpointer tests: training states, and checks of a checkpoint folder."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.storage import directory as folders
from outlast.async_checkpoint.storage.local import LocalStorage

NET = datetime.timedelta(seconds=60)
"""How long a save may take before its test fails."""


def state_of(step: int, elements: int = 5000) -> dict[str, Any]:
    """A state of which every part depends on the step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {
            "weight": torch.randn(elements, generator=generator),
            "bias": torch.full((7,), float(step)),
        },
        "steps": step,
        "note": f"after {step}",
    }


def blank() -> dict[str, Any]:
    """A state of the same structure to restore into."""
    state = state_of(0)
    for tensor in state["model"].values():
        tensor.fill_(-1)
    return {**state, "steps": -1, "note": ""}


def same(one: Any, other: Any) -> bool:
    """Whether two states are bit-identical."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and _bits(one) == _bits(other)
        )
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(same(value, other[key]) for key, value in one.items())
        )
    if isinstance(one, list | tuple):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(same(a, b) for a, b in zip(one, other, strict=True))
        )
    return type(one) is type(other) and bool(one == other)


def _bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def copy_of(state: Any) -> Any:
    """A deep copy of a state."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: copy_of(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copy_of(value) for value in state)
    return state


def save_steps(path: Path, *steps: int) -> None:
    """Saves a checkpoint of `state_of` for each step."""
    with Checkpointer(path) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step)).wait(NET)


def restored(path: Path, **options: Any) -> int | None:
    """The step that a new checkpointer restores; checks the state."""
    with Checkpointer(path) as checkpointer:
        state = blank()
        step = checkpointer.restore(state, **options)
    if step is not None:
        assert same(state, state_of(step))
    return step


def valid_steps(path: Path) -> list[int]:
    """The steps that have a checkpoint. Fails if a visible one is incomplete or damaged."""
    storage = LocalStorage(str(path))
    found = sorted(step for step, _ in folders.candidates(storage))
    for step in found:
        folders.verify(storage, step)
    return found


def left_over(path: Path) -> list[str]:
    """The entries of the folder that are not checkpoints."""
    return sorted(
        p.name for p in path.iterdir() if p.name not in (".lock", ".id") and p.name[:5] != "step-"
    )


def folder_of(path: Path, step: int) -> Path:
    """The folder of a checkpoint."""
    return path / f"step-{step:08d}"
