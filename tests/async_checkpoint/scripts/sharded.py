"""Ranks with sharded state: FSDP2's, DTensors of several placements, ShardedTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RANK, WORLD_SIZE, join_group, leave_group, main, raising, say, scenario
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from async_checkpoint.checkpoints import NET
from outlast.async_checkpoint import Checkpointer
from outlast.errors import CheckpointError


def whole(state: Any) -> Any:
    """The state with every DTensor gathered."""
    if isinstance(state, DTensor):
        return state.full_tensor().detach().clone()
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return [whole(value) for value in state] if isinstance(state, list) else state


def flat(state: Any, path: str = "") -> dict[str, Any]:
    if isinstance(state, dict):
        return {
            k: v for key, value in state.items() for k, v in flat(value, f"{path}.{key}").items()
        }
    if isinstance(state, list):
        return {k: v for i, x in enumerate(state) for k, v in flat(x, f"{path}[{i}]").items()}
    return {path: state}


def dtensors(seed: int) -> dict[str, Any]:
    """Placements that cut unevenly, along several dimensions, and not at all."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    state: dict[str, Any] = {
        "rows": distribute_tensor(torch.randn(7, 5), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.randn(4, 9), mesh, [Shard(1)]),
        "few": distribute_tensor(torch.randn(2, 3), mesh, [Shard(0)]),
        "everywhere": distribute_tensor(torch.randn(6), mesh, [Replicate()]),
        "plain": torch.randn(3),
    }
    if WORLD_SIZE == 4:
        square = init_device_mesh("cpu", (2, 2))
        state["square"] = distribute_tensor(torch.randn(6, 6), square, [Shard(0), Shard(1)])
    else:
        state["square"] = distribute_tensor(torch.randn(6, 6), mesh, [Shard(1)])
    return state


def fsdp(seed: int) -> dict[str, Any]:
    """A sharded model after two steps of a sharded Adam."""
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    net = torch.nn.Sequential(torch.nn.Linear(9, 13), torch.nn.ReLU(), torch.nn.Linear(13, 5))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1 * seed)
    for _ in range(2):
        net(torch.ones(4, 9)).sum().backward()
        optimizer.step()
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict()}


def both(seed: int) -> dict[str, Any]:
    return {"fsdp": fsdp(seed), "dtensors": dtensors(seed)}


@scenario
def saves(path: str) -> None:
    join_group()
    state = both(1)
    expected = whole(state)
    with Checkpointer(path) as checkpointer:
        checkpointer.save(1, state).wait(NET)
        if RANK == 0:
            torch.save(expected, f"{path}/expected")
            assert checkpointer.verify(1).world_size == WORLD_SIZE
        dist.barrier()
        found = both(2)
        assert checkpointer.restore(found) == 1  # from memory
        check(found, expected)
    leave_group()


@scenario
def loads(path: str) -> None:
    join_group()
    expected = torch.load(f"{path}/expected", weights_only=False)
    with Checkpointer(path) as checkpointer:
        found = both(3)
        assert checkpointer.restore(found) == 1
        check(found, expected)
    leave_group()


def check(found: Any, expected: Any) -> None:
    found, expected = flat(whole(found)), flat(expected)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        equal = torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value
        assert equal, name


@scenario
def fsdp_trains(path: str, until: str) -> None:
    """Trains a sharded model as docs/checkpoints.md has it; saves after step 3."""
    join_group()
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(9, 13), torch.nn.ReLU(), torch.nn.Linear(13, 5))
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def training_state() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    with Checkpointer(path, overlap=optimizer) as checkpointer:
        if checkpointer.checkpoints():
            for wrong in (
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                {"model": model.state_dict(), "optimizer": {}},
            ):
                raising(lambda wrong=wrong: checkpointer.restore(wrong))
            assert wrong["optimizer"] == {}
        state = training_state()
        first = checkpointer.restore(state)
        if first is None:
            optimizer.state.clear()
        else:
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        for step in range(first or 0, int(until)):
            torch.manual_seed(100 * step + RANK)
            loss = model(torch.randn(4, 9)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            say("trained", step=step, loss=loss.item().hex())
            if step == 2:
                checkpointer.save(3, training_state())
    leave_group()


@scenario
def sharded_tensor(path: str) -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    join_group()
    spec = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(WORLD_SIZE)])
    tensor = sharded_tensor.rand(spec, 5, 4)
    wanted = tensor.local_shards()[0].tensor.clone()
    with Checkpointer(path) as checkpointer:
        checkpointer.save(1, {"x": tensor}).wait(NET)
    found = sharded_tensor.zeros(spec, 5, 4)
    with Checkpointer(path) as checkpointer:
        assert checkpointer.restore({"x": found}) == 1
        assert torch.equal(found.local_shards()[0].tensor, wanted)
        half = sharded_tensor.zeros(spec, 5, 4, dtype=torch.float16)
        with pytest.raises(CheckpointError, match="'x' is float16, float32 was saved"):
            checkpointer.restore({"x": half})
        # The saved values are the current ones, not those of the previous save.
        half = sharded_tensor.full(spec, (5, 4), 2.5, dtype=torch.float16)
        checkpointer.save(2, {"x": half}).wait(NET)
        found = sharded_tensor.zeros(spec, 5, 4, dtype=torch.float16)
        assert checkpointer.restore({"x": found}) == 2
        assert bool((found.local_shards()[0].tensor == 2.5).all())
    leave_group()


@scenario
def ranks_change_places(path: str) -> None:
    """In the same processes, as after a restart in place that reassigns ranks."""
    whole = torch.arange(12.0)
    for life in range(3):
        rank = (RANK + life) % WORLD_SIZE
        store: Any = dist.FileStore(f"{path}-store{life}", WORLD_SIZE)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        checkpointer = Checkpointer(path)
        if life:
            found = distribute_tensor(torch.zeros(12), mesh, [Shard(0)])
            assert checkpointer.restore({"w": found}) == life
            assert torch.equal(found.full_tensor(), whole * life)
        saved = distribute_tensor(whole * (life + 1), mesh, [Shard(0)])
        checkpointer.save(life + 1, {"w": saved}).wait(NET)
        dist.barrier()
        if life < 2:
            checkpointer.abort()
        else:
            checkpointer.close()
        leave_group()


if __name__ == "__main__":
    main()
