"""The releaser leaves no process group, whatever state torch's records were in."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from outlast.inprocess.interruption import gloo, release
from outlast.inprocess.interruption.release import Releaser


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def releaser() -> Iterator[Releaser]:
    made = Releaser()
    yield made
    made.release()  # should the test have failed
    made.join()


def make_groups() -> list[str]:
    """The default group and another; their names."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    dist.new_group([0])
    return sorted(dist.distributed_c10d._world.pg_names.values())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def assert_nothing_is_left() -> None:
    world = dist.distributed_c10d._world
    assert not dist.is_initialized()
    assert not world.pg_map
    assert not world.pg_names
    assert world.group_count == 0
    assert not gloo.pair_sockets()


def test_all_groups_are_gone_and_names_begin_anew(releaser: Releaser) -> None:
    before = descriptors()
    names = make_groups()
    assert descriptors() > before
    for _ in range(2):
        releaser.hold()
        releaser.release()
        releaser.join()
        assert_nothing_is_left()
        assert descriptors() == before
        assert make_groups() == names


def test_what_an_interrupted_destruction_has_left(releaser: Releaser) -> None:
    make_groups()
    releaser.hold()
    dist.distributed_c10d._update_default_pg(None)  # torch's own order, broken off half way
    dist.distributed_c10d._world.pg_map.clear()
    releaser.release()
    releaser.join()
    assert_nothing_is_left()


def test_a_destruction_that_fails_holds_nothing_up(
    releaser: Releaser, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("no such group")

    make_groups()
    monkeypatch.setattr(dist, "destroy_process_group", fail)
    releaser.release()
    releaser.join()
    assert_nothing_is_left()
    assert "the restart continues" in caplog.text


def test_without_groups_there_is_nothing_to_do(releaser: Releaser) -> None:
    releaser.hold()
    releaser.release()
    releaser.join()
    assert_nothing_is_left()


def test_a_destroyed_group_is_kept_while_a_module_has_it(releaser: Releaser) -> None:
    before, destroy = descriptors(), dist.destroy_process_group
    with releaser.keeping_destroyed():
        make_groups()
        dist.destroy_process_group()
        assert descriptors() == before  # nobody has it
        for _ in range(release._MOST_KEPT + 2):  # only so many are kept
            make_groups()
            of_module = dist.group.WORLD
            dist.destroy_process_group()
            assert not dist.is_initialized()
            del of_module
            assert descriptors() > before
        releaser.release()
        releaser.join()
    assert dist.destroy_process_group is dist.distributed_c10d.destroy_process_group is destroy
    for thread in threading.enumerate():
        if thread.name == "outlast-release":
            thread.join()
    assert_nothing_is_left()
    assert descriptors() == before


def test_a_name_that_is_imported_in_the_call_is_torchs_after_it(
    releaser: Releaser, monkeypatch: pytest.MonkeyPatch
) -> None:
    destroy = dist.destroy_process_group
    program: Any = ModuleType("program")
    monkeypatch.setitem(sys.modules, "program", program)
    with releaser.keeping_destroyed():
        exec("from torch.distributed import destroy_process_group", vars(program))
        assert program.destroy_process_group is not destroy
    assert program.destroy_process_group is destroy


def test_a_group_that_is_left_is_not_kept(releaser: Releaser) -> None:
    with releaser.keeping_destroyed():
        make_groups()
        dist.destroy_process_group(dist.new_group([0]))
        assert dist.group.WORLD not in releaser._held
        releaser._held.clear()
        dist.destroy_process_group()
        assert not releaser._held


def test_a_rank_that_has_another_place_in_an_equal_mesh_knows_its_own_shard(
    releaser: Releaser,
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in (1, 0):
        dist.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
        mesh = init_device_mesh("cpu", (3,))
        part = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False)
        for made in (part, part.detach(), torch.zeros_like(part)):
            spec = made.shape, made.device_mesh, made.placements
            assert compute_local_shape_and_global_offset(*spec)[1] == (2 * rank,)
        releaser.release()
