"""Saves from the memory of a GPU, and restores to it: the state at the moment of the save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from async_checkpoint.checkpoints import NET
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.snapshot.device_copy import DeviceChunks
from outlast.async_checkpoint.snapshot.snapshot import Snapshot
from outlast.elastic.random_generators import capture, setter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(90),
    pytest.mark.filterwarnings("default"),
]


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(1024, 1024) for _ in range(4)]
        self.net = torch.nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.data = torch.randn(256, 1024, device="cuda")

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.net(self.data).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}


def on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: on_cpu(each) for key, each in value.items()}
    return [on_cpu(each) for each in value] if isinstance(value, list) else value


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return all(equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_state_at_the_save_is_saved_and_restored_to_the_gpu(
    tmp_path: Path, overlap: bool
) -> None:
    training, expected = Training(), {}
    training.step()
    with Checkpointer(
        tmp_path, overlap=training.optimizer if overlap else False, max_in_flight=2
    ) as checkpointer:
        for step in range(6):
            torch.cuda._sleep(1 << 26)  # the copy is queued behind kernels that have not run
            training.step()
            checkpointer.save(step, training.state())
            training.step()
            torch.cuda._sleep(1 << 26)
        checkpointer.wait(NET)
    again = Training()
    again.step()
    for step in range(6):
        again.step()
        expected[step] = on_cpu(again.state())
        again.step()
    with Checkpointer(tmp_path) as checkpointer:
        for step, state in expected.items():
            found = training.state()
            assert checkpointer.restore(found, step=step) == step
            assert found["net"]["0.weight"].is_cuda
            assert equal(on_cpu(found), state)


def test_an_overlapped_copy_is_made_by_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[type] = []
    fill = Snapshot._fill_all

    def noted(copy: Snapshot, chunks: Any) -> None:
        kinds.append(type(chunks))
        fill(copy, chunks)

    monkeypatch.setattr(Snapshot, "_fill_all", noted)
    training = Training()
    training.step()
    with Checkpointer(tmp_path, overlap=training.optimizer) as checkpointer:
        checkpointer.save(1, training.state())
        training.step()
        checkpointer.wait(NET)
    assert kinds == [DeviceChunks]


def test_kernels_of_training_run_while_a_save_is_copied(tmp_path: Path) -> None:
    training = Training()
    training.step()
    torch.cuda.synchronize()
    with Checkpointer(tmp_path, overlap=training.optimizer) as checkpointer:
        handle = checkpointer.save(1, training.state())
        training.net(training.data).square().mean().backward()
        torch.cuda.current_stream().synchronize()  # of training: it waits for no copy
        assert training.net[0].weight.grad is not None
        training.optimizer.step()
        handle.wait(NET)


def test_snapshot_buffers_are_page_locked(tmp_path: Path) -> None:
    training = Training()
    training.step()
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, training.state())
        checkpointer.wait(NET)
        pool = checkpointer.session.pool
        buffers = [buffer for buffer in pool.buffers if buffer.memory is not None]
        assert buffers
        assert all(buffer.pinned is not None for buffer in buffers)
        assert all(target.is_pinned() for target in buffers[0].targets if target.nbytes)


def test_the_generators_of_the_gpu_are_restored() -> None:
    torch.rand(3, device="cuda")
    states = capture()
    expected = torch.rand(8, device="cuda")
    setter("cuda", states["cuda"])()
    assert torch.equal(torch.rand(8, device="cuda"), expected)
