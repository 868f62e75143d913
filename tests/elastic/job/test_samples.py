"""The counters of a job: samples that are right for every loader, and steps in the event log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from elastic.small_jobs import job
from fake_clock import FakeClock
from outlast.elastic import ElasticLoader, ElasticSampler, ShardedStream
from outlast.elastic.job.counters import StepEvents
from outlast.events.emitter import Emitter, MemorySink
from outlast.events.types import StepsDone

DATA = TensorDataset(torch.arange(22.0))
REPLICA = {"rank": 1, "replicas": 2}  # one of two: the count is that of both


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({}, [8, 16, 22]),
        (REPLICA, [8, 16, 22]),
        ({"drop_last": True}, [8, 16]),
        ({"max_batch_size": 3, **REPLICA}, [8, 16, 22]),
        ({"virtual_replicas": 4, **REPLICA}, [8, 16, 22]),
    ],
)
def test_an_elastic_loader_counts(
    tmp_path: Path, options: dict[str, Any], counts: list[int]
) -> None:
    loader = ElasticLoader(DATA, global_batch_size=8, **options)
    seen = []
    with job(tmp_path, loader=loader) as one:
        one.restore()
        for _ in loader:
            if loader.boundary:
                one.step()
                seen.append(one.samples)
    assert seen == counts


def test_a_step_of_several_batches_counts_all_of_them(tmp_path: Path) -> None:
    loader = ElasticLoader(DATA, global_batch_size=4)
    seen = []
    with job(tmp_path, loader=loader) as one:
        one.restore()
        for number, _ in enumerate(loader, 1):
            if number % 2 == 0:
                one.step()
                seen.append(one.samples)
    assert seen == [8, 16, 22]


def items(shard: str, offset: int) -> Iterator[int]:
    return iter(range(offset, int(shard)))


def test_a_stream_counts(tmp_path: Path) -> None:
    stream = ShardedStream(["7", "4"], items, batch_size=4)
    seen = []
    with job(tmp_path, loader=stream) as one:
        one.restore()
        for _ in stream:
            one.step()
            seen.append(one.samples)
    assert seen == [4, 8, 11]


def test_a_resized_job_goes_on_counting(tmp_path: Path) -> None:
    """Whatever the new job's loader has counted before, or counts after another restore."""
    with job(tmp_path, loader=ElasticLoader(DATA, global_batch_size=8, **REPLICA)) as one:
        one.restore()
        for _ in zip(range(2), one.loader, strict=False):
            one.step()
        assert one.samples == 16
    loader = ElasticLoader(DATA, global_batch_size=8, rank=2, replicas=3)
    with job(tmp_path, loader=loader) as other:
        for _ in range(2):
            assert other.restore() == 2
            assert other.samples == 16
            for _ in loader:
                other.step()
            assert other.samples == 22


@pytest.mark.parametrize("kind", ["distributed sampler", "batch sampler", "plain"])
def test_a_loader_that_does_not_count(tmp_path: Path, kind: str) -> None:
    loader: DataLoader[Any] = {
        "distributed sampler": lambda: DataLoader(
            DATA, batch_size=8, sampler=DistributedSampler(DATA, num_replicas=2, rank=1)
        ),
        "batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(range(22), 8, False)),
        "plain": lambda: DataLoader(DATA, batch_size=8),
    }[kind]()
    with pytest.raises(ValueError, match=r"'loader' \(DataLoader\) has no .*: use .*ElasticLoader"):
        job(tmp_path / "never", loader=loader)
    with job(tmp_path) as one:
        one.restore()
        for (batch,) in loader:
            one.step(samples=len(batch))
        assert one.samples == (22 if kind != "distributed sampler" else 11)
        one.step()
        with pytest.raises(ValueError, match=r"unknown: a step was made with no loader.*samples="):
            _ = one.samples
        last = one.steps
    with job(tmp_path) as other:
        assert other.restore() == last
        other.step(samples=8)
        with pytest.raises(ValueError, match=r"job\.samples is unknown"):
            _ = other.samples


class Own:
    """A loader with its own position, which says how many samples each batch had."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Counting(Own):
    def done(self) -> int:
        return 5


def test_a_third_party_loader(tmp_path: Path) -> None:
    with job(tmp_path / "counting", loader=Counting()) as one:
        one.restore()
        one.step()
        one.step(samples=3)
        assert one.samples == 8
    with job(tmp_path / "own", loader=Own()) as other:
        other.restore()
        other.step(samples=3)
        assert other.samples == 3
        other.step()
        with pytest.raises(ValueError, match="made with a Own"):
            _ = other.samples


def restored(path: Path, loader: Any) -> None:
    with job(path, loader=loader) as one:
        assert one.restore() == 2


def changes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "global batch size" in message]


@pytest.mark.parametrize("kind", ["loader", "stream"])
def test_another_global_batch_size_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    def loader(size: int, rank: int = 0) -> Any:
        place: dict[str, Any] = {"rank": rank, "replicas": 2}
        if kind == "stream":  # one process: the replicas do not exchange offsets
            return ShardedStream(["30", "31"], items, batch_size=size // 2, **place)
        return ElasticLoader(DATA, global_batch_size=size, **place)

    with job(tmp_path, loader=loader(8)) as one:
        one.restore()
        for _ in zip(range(2), one.loader, strict=False):
            one.step()
    with caplog.at_level(logging.WARNING, "outlast"):
        restored(tmp_path, loader(8))
        restored(tmp_path, loader(4, rank=1))
        assert changes(caplog) == []
        restored(tmp_path, loader(4))
    (message,) = changes(caplog)
    assert message.startswith("the global batch size is 4, 8 was saved: training continues at ")
    if kind == "loader":
        assert "at sample 16 of 22 of epoch 0, with 2 steps left in it" in message


def test_a_checkpoint_without_a_global_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a version that did not save it."""
    complete = ElasticSampler.state_dict

    def state_dict(self: ElasticSampler) -> dict[str, Any]:
        return {k: v for k, v in complete(self).items() if k != "global_batch_size"}

    with monkeypatch.context() as patched:
        patched.setattr(ElasticSampler, "state_dict", state_dict)
        with job(tmp_path, loader=ElasticLoader(DATA, global_batch_size=8)) as one:
            one.restore()
            for _ in zip(range(2), one.loader, strict=False):
                one.step()
    restored(tmp_path, ElasticLoader(DATA, global_batch_size=4))
    assert changes(caplog) == []


def recorded(sink: MemorySink) -> list[tuple[int, int]]:
    return [(event.first, event.last) for event in sink.events if isinstance(event, StepsDone)]


def test_an_event_every_ten_seconds_and_one_at_the_end() -> None:
    clock, sink = FakeClock(), MemorySink()
    steps = StepEvents(Emitter(sink, clock=clock))
    steps.begin(100)
    for step in range(101, 126):
        clock.advance(1.0)
        steps.completed(step)
    assert recorded(sink) == [(100, 110), (100, 120)]
    steps.write()
    steps.write()
    assert recorded(sink)[2:] == [(100, 125)]


def test_another_restore_begins_anew() -> None:
    sink = MemorySink()
    steps = StepEvents(Emitter(sink, clock=FakeClock()))
    steps.begin(0)
    steps.write()
    steps.completed(1)
    steps.begin(20)
    steps.completed(21)
    steps.begin(30)
    steps.write()
    assert recorded(sink) == [(0, 0), (0, 1), (20, 21), (30, 30)]
