"""C1 and C4 on S3: a whole checkpointer against a real server."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
from collections.abc import Callable
from contextlib import closing
from typing import Any

import fsspec.asyn
import pytest
import torch
import torch.distributed.checkpoint as dcp

from async_checkpoint.storage.s3 import Server, keys, uploads
from outlast import Checkpointer
from outlast.async_checkpoint import Retention
from outlast.async_checkpoint.storage import directory as folders
from outlast.async_checkpoint.storage.remote import RemoteStorage
from outlast.errors import CheckpointError
from procs import Job

try:
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader
except ImportError:  # before torch 2.15
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader


def state(value: float, megabytes: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(int(value))
    large = torch.rand(megabytes << 18, generator=generator)
    return {"model": {"large": large, "small": torch.full((3,), value)}, "epoch": int(value)}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return bool(
        torch.equal(left["model"]["large"], right["model"]["large"])
        and torch.equal(left["model"]["small"], right["model"]["small"])
        and left["epoch"] == right["epoch"]
    )


@pytest.mark.slow
def test_saved_restored_replaced_and_tidied(s3: Server) -> None:
    url = s3.new_url()
    with Checkpointer(url, keep=Retention(last=2)) as checkpointer:
        assert checkpointer.restore(state(0)) is None
        for step in (1, 2, 3):
            checkpointer.save(
                step, state(step, megabytes=20 if step == 2 else 1), metric=step / 2
            ).wait()
        checkpointer.save(3, state(33)).wait()
        assert [info.step for info in checkpointer.checkpoints()] == [2, 3]
        assert checkpointer.verify(3).tensors == 2
    with Checkpointer(url) as checkpointer:
        # The replaced checkpoint was removed at the latest when the folder was opened.
        assert len({key.split("/")[0] for key in keys(url)} - {".owner", ".id"}) == 2
        loaded = state(0)
        assert checkpointer.restore(loaded) == 3
        assert same(loaded, state(33))
        loaded = state(0, megabytes=20)
        assert checkpointer.restore(loaded, step=2) == 2
        assert same(loaded, state(2, megabytes=20))
    assert ".owner" not in keys(url)
    assert uploads(url) == []


@pytest.mark.slow
def test_plain_torch_reads_it(s3: Server) -> None:
    url = s3.new_url()
    with Checkpointer(url) as checkpointer:
        checkpointer.save(7, state(7)).wait()
        (info,) = checkpointer.checkpoints()
    loaded = state(0)
    if "kwargs" not in inspect.signature(FsspecReader).parameters:
        pytest.skip("in torch 2.6, it has no connections of its own")
    reader = FsspecReader(f"{url}/{info.folder}", skip_instance_cache=True)
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(loaded, storage_reader=reader)
    fsspec.asyn.sync(reader.fs.fs.loop, reader.fs.fs.s3.close)
    assert same(loaded, state(7))


@pytest.mark.slow
@pytest.mark.parametrize("verdict", ["drop", pytest.param("go", marks=pytest.mark.slow)])
def test_nothing_is_visible_before_the_manifest(s3: Server, verdict: str) -> None:
    url = s3.new_url()
    with closing(RemoteStorage(url)) as other, Checkpointer(url) as checkpointer:
        checkpointer.save(1, state(1)).wait()
        s3.hold("manifest.json")
        handle = checkpointer.save(2, state(2))
        assert "step-00000002-" in s3.held()
        assert any(key.startswith("step-00000002-") for key in keys(url))
        assert [step for step, _ in folders.candidates(other)] == [1]
        assert [info.step for info in checkpointer.checkpoints()] == [1]
        s3.let(verdict)
        if verdict == "go":
            handle.wait()
        else:
            with pytest.raises(CheckpointError, match=r"manifest\.json"):
                handle.wait()
        left = [1, 2] if verdict == "go" else [1]
        assert [info.step for info in checkpointer.checkpoints()] == left
        assert {key.split("/")[0][:13] for key in keys(url)} - {".owner", ".id"} == {
            f"step-{step:08d}" for step in left
        }


@pytest.mark.slow
def test_a_snapshot_belongs_to_the_folder_and_not_to_its_name(s3: Server) -> None:
    url = s3.new_url()
    first = Checkpointer(url)
    first.save(5, state(5)).wait()
    first.abort()
    storage = first.session.storage
    assert isinstance(storage, RemoteStorage)
    for key in keys(url):
        storage._fs.rm_file(f"{storage._root}/{key}")
    storage.unlock()
    first.session.locked = False
    with Checkpointer(url) as second:
        assert second.restore(state(0)) is None


@pytest.mark.slow
@pytest.mark.parametrize("at", [".distcp", "manifest.json", "after:manifest.json"])
def test_a_writer_that_is_killed_leaves_the_last_good_one(s3: Server, at: str) -> None:
    url = s3.new_url()
    with Checkpointer(url) as checkpointer:
        checkpointer.save(1, state(1)).wait()
        s3.hold(at)
        # Of the same step: the older one must not suffer.
        handle = checkpointer.save(1, state(2, megabytes=20))
        s3.held()
        # The manifest is the commit, even if its writer has no reply yet.
        committed = at.startswith("after:")
        assert len({key for key in keys(url) if key.endswith("manifest.json")}) == 1 + committed
        pid = checkpointer.session.writer.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with (
            contextlib.nullcontext()
            if committed
            else pytest.raises(CheckpointError, match="killed by SIGKILL")
        ):
            handle.wait()
        s3.let("drop")
        assert [info.step for info in checkpointer.checkpoints()] == [1]
        checkpointer.verify(1)
        checkpointer.save(3, state(3)).wait()
        assert [info.step for info in checkpointer.checkpoints()] == [1, 3]
    assert uploads(url) == []
    with Checkpointer(url) as checkpointer:
        expected = state(2, megabytes=20) if committed else state(1)
        loaded = state(0, megabytes=20 if committed else 1)
        assert checkpointer.restore(loaded, step=1) == 1
        assert same(loaded, expected)
        loaded = state(0)
        assert checkpointer.restore(loaded) == 3
        assert same(loaded, state(3))


@pytest.mark.slow
def test_a_damaged_one_is_passed_over(s3: Server) -> None:
    url = s3.new_url()
    with Checkpointer(url) as checkpointer:
        checkpointer.save(1, state(1)).wait()
        checkpointer.save(2, state(2)).wait()
        folder = checkpointer.checkpoints()[-1].folder
    with closing(RemoteStorage(url)) as storage:
        content = bytearray(storage.get(folder, "__0_0.distcp"))
        content[len(content) // 2] ^= 1
        storage.put(folder, "__0_0.distcp", bytes(content))
    with Checkpointer(url) as checkpointer:
        loaded = state(0)
        assert checkpointer.restore(loaded) == 1
        assert same(loaded, state(1))
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp: damaged between bytes"):
            checkpointer.verify(2)


@pytest.mark.slow
def test_two_ranks(s3: Server, ranks: Callable[..., Job]) -> None:
    url = s3.new_url()
    with ranks("s3_ranks", url, nprocs=2, env=s3.environment) as job:
        job.start_all()
        ended = job.wait_all()
        assert set(ended.values()) == {0}, "\n".join(map(job.errors, range(2)))
        for rank in range(2):
            assert job.lines(rank)[-1] == {"event": "restored", "step": 5, "same": True}
    assert len([key for key in keys(url) if key.endswith(".distcp")]) >= 2
