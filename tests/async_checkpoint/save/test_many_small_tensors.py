"""A state of many small tensors: they are copied at once, each by its address."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from async_checkpoint.checkpoints import NET, copy_of, same
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.snapshot import snapshot as snapshot_module
from outlast.async_checkpoint.snapshot.chunk_copy import copy_small
from outlast.async_checkpoint.snapshot.plan import Item, share_out
from outlast.async_checkpoint.state_dict import leaf_numbers, look_up, signature_and_leaves
from outlast.errors import CheckpointError, TornSnapshot

LARGE = 100_000


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "_FEW", 3)


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    sizes = [(7,), (LARGE,), (3, 5), (0, 4), (), (1000,), (2, 2), (LARGE,), (9,)]
    return [torch.nn.Parameter(torch.randn(size)) for size in sizes]


def state_of(owned: list[torch.nn.Parameter]) -> dict[str, Any]:
    square = torch.randn(6, 6)
    return {
        "owned": {str(number): each.detach() for number, each in enumerate(owned)},
        "transposed": square.t(),
        "a part": square[:, 2],
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
        "negative": torch.randn(5, dtype=torch.complex64).conj().imag,
        "half": torch.randn(11).bfloat16(),
        "made in inference mode": inferred(),
        "number": 3,
    }


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(13)


def resolved(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: resolved(each) for key, each in state.items()}
    return state.resolve_conj().resolve_neg() if isinstance(state, torch.Tensor) else state


def zeros_like(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: zeros_like(each) for key, each in state.items()}
    return torch.zeros(state.shape, dtype=state.dtype) if isinstance(state, torch.Tensor) else 0


@pytest.mark.parametrize("overlap", [False, True])
def test_tensors_of_all_kinds_are_saved(tmp_path: Path, overlap: bool) -> None:
    owned = parameters()
    optimizer = torch.optim.SGD(owned, 0.1)
    with Checkpointer(tmp_path, overlap=optimizer if overlap else ()) as checkpointer:
        for step in (1, 2, 3):  # the later ones have the views of the first
            with torch.no_grad():
                for parameter in owned:
                    parameter.add_(1.0)
            state = state_of(owned)
            checkpointer.save(step, state).wait(NET)
            found = zeros_like(state)
            assert checkpointer.restore(found, step=step) == step
            assert same(found, resolved(state))
    with Checkpointer(tmp_path) as checkpointer:  # with the checksums of what is on the disk
        found = zeros_like(state)
        assert checkpointer.restore(found) == 3
        assert same(found, resolved(state))


def test_a_small_tensor_may_change_before_the_step(tmp_path: Path) -> None:
    """It is copied when `save` returns, though an optimizer has it."""
    owned = parameters()
    optimizer = torch.optim.SGD(owned, 0.1)
    with Checkpointer(tmp_path, overlap=optimizer) as checkpointer:
        expected = copy_of({str(number): each.detach() for number, each in enumerate(owned)})
        state = {str(number): each.detach() for number, each in enumerate(owned)}
        handle = checkpointer.save(1, state)
        with torch.no_grad():
            for parameter in owned:
                if parameter.numel() < LARGE:
                    parameter.add_(1.0)
        handle.wait(NET)
        found = zeros_like(state)
        assert checkpointer.restore(found) == 1
        assert same(found, expected)


def test_a_write_by_another_thread_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {str(number): torch.ones(number) for number in range(1, 9)}

    def copy(copies: Iterator[tuple[int, int, int]]) -> None:
        copy_small(copies)
        writing = threading.Thread(target=lambda: state["4"].add_(1))
        writing.start()
        writing.join()

    with Checkpointer(tmp_path) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(snapshot_module, "copy_small", copy)
            handle = checkpointer.save(1, state)
        with pytest.raises(CheckpointError, match="'4' was written to by another thread"):
            handle.wait(NET)
        assert checkpointer.checkpoints() == []


def test_all_tensors_are_of_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is copied later: another thread writes to it when the small ones are copied."""
    owned = parameters()
    optimizer = torch.optim.SGD(owned, 0.1)

    def copy(copies: Iterator[tuple[int, int, int]]) -> None:
        copy_small(copies)
        writing = threading.Thread(target=lambda: owned[1].detach().add_(1))
        writing.start()
        writing.join()

    with Checkpointer(tmp_path, overlap=optimizer) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(snapshot_module, "copy_small", copy)
            handle = checkpointer.save(1, {str(n): each for n, each in enumerate(owned)})
        with pytest.raises(TornSnapshot, match="'1' was written to"):
            handle.wait(NET)
        assert checkpointer.checkpoints() == []


def test_the_memory_is_mapped_during_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may close it: what is copied to an address that is gone ends the process."""

    def copy(copies: Iterator[tuple[int, int, int]]) -> None:
        (buffer,) = checkpointer.session.pool.buffers
        memory = buffer.memory
        assert memory is not None
        buffer.drop_memory()
        assert not memory._map.closed
        copy_small(copies)
        raise InterruptedError

    monkeypatch.setattr(snapshot_module, "copy_small", copy)
    state = {str(number): torch.ones(number) for number in range(1, 9)}
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(InterruptedError):
        checkpointer.save(1, state)


def test_a_whole_tensor_and_a_part_of_it_are_refused() -> None:
    whole = Item("a", ("a",), "tensor", (0,), (4,), (4,), "float32")
    part = Item("a", ("a",), "tensor", (2,), (2,), (4,), "float32")
    assert share_out({0: [[whole]], 1: [[whole]]}) == {0: [whole.key], 1: []}
    for plans in ({0: [[whole]], 1: [[part]]}, {0: [[part]], 1: [[]]}):
        with pytest.raises(CheckpointError, match="each of which must be in one part"):
            share_out(plans)


def test_leaves_are_numbered_as_they_are_listed() -> None:
    state = {"a": [1, {"b": torch.ones(2), "c": {}}, [], "text"], 7: (1, 2), "d": {"e": [2.5]}}
    leaves = signature_and_leaves(state)[1]
    numbers = leaf_numbers(state)
    assert list(numbers.values()) == list(range(len(leaves)))
    assert all(look_up(state, path) is leaves[number] for path, number in numbers.items())
