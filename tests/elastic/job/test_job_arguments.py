"""The arguments of `Job` and of what it is made of: wrong ones are refused by name, at the call."""

from __future__ import annotations

import collections
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import outlast
from elastic.small_jobs import job
from outlast.async_checkpoint import Retention
from outlast.elastic import ConsistentDDP, ElasticLoader, ElasticSampler, ShardedStream

DATA = TensorDataset(torch.arange(8.0))


def loader(**options: Any) -> ElasticLoader:
    return ElasticLoader(DATA, **{"global_batch_size": 4, **options})


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda path: job(path, foo=1), r"^Job\(\) has no option 'foo'; it has .*every"),
        (lambda path: job(path, evry=1), r"^Job\(\) has no option 'evry'; did you mean 'every'"),
        (lambda path: job(path, thread=1), r"^Job\(\) has no option 'thread'; .* 'threads'"),
        (lambda path: loader(num_worker=1), r"^ElasticLoader\(\) .* 'num_worker'; .*num_workers"),
        (lambda path: job(path, keep="3"), "^keep must be a Retention or an int, not '3'"),
        (lambda path: job(path, keep=True), "^keep must be a Retention or an int, not True"),
        (lambda path: Retention(last=1.5), "^last must be an int, not 1.5"),  # type: ignore[arg-type]
        (lambda path: loader(global_batch_size=2.0), "^global_batch_size must be an int, not 2.0"),
        (lambda path: job(path, min_ranks=1.5), "^min_ranks must be an int, not 1.5"),
        (lambda path: loader(seed="1"), "^seed must be an int, not '1'"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(
    tmp_path: Path, made: Callable[[Path], Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        made(tmp_path)


def test_a_wrong_number_is_refused_by_name(tmp_path: Path) -> None:
    for wrong in (lambda: job(tmp_path, keep=0), lambda: outlast.Checkpointer(tmp_path, keep=-1)):
        with pytest.raises(ValueError, match=r"^keep must be at least 1"):
            wrong()


def test_live_state_is_required_only_where_it_is_possible(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^live must be True, False or 'auto', not 'yes'"):
        job(tmp_path, live="yes")
    with pytest.raises(ValueError, match=r"^live=True: without inprocess.Wrapper"):
        job(tmp_path, live=True)


REQUIRED = """
import sys
import torch
import outlast
from outlast import inprocess

class Extra(torch.nn.Linear):
    def get_extra_state(self):
        return torch.ones(1)
    def set_extra_state(self, state):
        pass

@inprocess.Wrapper()
def train():
    model = Extra(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with outlast.Job(sys.argv[1], model=model, optimizer=optimizer, live=True) as job:
        job.restore()

train()
"""


@pytest.mark.slow
def test_it_is_an_error_if_required_live_state_is_not_possible(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(REQUIRED)
    command = [sys.executable, str(script), str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 93
    assert "ValueError: live=True: '_extra_state' of the model's state" in done.stderr


def test_a_number_is_that_of_the_newest_checkpoints(tmp_path: Path) -> None:
    with job(tmp_path, keep=3, every=1) as one:
        one.restore()
        for _ in range(6):
            one.step()
            one.checkpointer.wait()
    with outlast.Checkpointer(tmp_path, keep=2) as checkpointer:
        assert [info.step for info in checkpointer.checkpoints()] == [4, 5, 6]
        checkpointer.save(7, {})
    with outlast.Checkpointer(tmp_path) as checkpointer:
        assert [info.step for info in checkpointer.checkpoints()] == [6, 7]


def test_numpy_integers_are_integers(tmp_path: Path) -> None:
    n = numpy.int64
    assert Retention(last=n(3), every=n(5), best=n(1)) == Retention(last=3, every=5, best=1)
    sampled = ElasticSampler(
        n(8), global_batch_size=n(4), seed=n(1), virtual_replicas=numpy.uint8(2)
    )
    assert all(type(value) is not n for value in sampled.state_dict().values())
    ShardedStream(["a"], lambda shard, offset: [], batch_size=n(4), rank=n(0), replicas=n(1))
    assert type(ConsistentDDP(nn.Linear(1, 1), n(2)).virtual_replicas) is int
    data = loader(global_batch_size=n(4), rank=n(0), replicas=n(1))
    with job(tmp_path, every=n(2), keep=n(2), threads=n(1), max_in_flight=n(1), loader=data) as one:
        one.restore()
        for _ in data:
            one.step(samples=n(4))
        one.checkpointer.save(n(7), {"a": n(1)}).wait()
        assert {type(one.steps), type(one.samples)} == {int}
        assert one.checkpointer.verify(n(7)).step == 7
        one.checkpointer.delete(n(7))
    with job(tmp_path, loader=data) as other:
        assert other.restore(n(2)) == 2
        assert other.samples == 8


def _cycle() -> dict[str, Any]:
    state: dict[str, Any] = {}
    state["self"] = state
    return state


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (_cycle(), r"\.self' cannot be saved: it contains itself"),
        (threading.Lock(), r"' cannot be saved: a lock"),
        (torch.empty(2, device="meta"), r"' cannot be saved: .*meta"),
        (collections.defaultdict(int), r"' cannot be saved: a defaultdict"),
    ],
)
def test_a_state_that_would_not_come_back_is_named_at_once(
    tmp_path: Path, value: Any, message: str
) -> None:
    class Held:
        def state_dict(self) -> dict[str, Any]:
            return {"v": value}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with (
        job(tmp_path, states={"held": Held()}) as made,
        pytest.raises(ValueError, match=rf"^'states.held.v{message}"),
    ):
        made.restore()
