"""The walks over a nested state that a restore of the survivors' state makes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import xxhash
from torch.utils._pytree import tree_leaves, tree_map_only

from outlast.async_checkpoint.state_dict import replaced
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import MemoryStore
from outlast.elastic.job.live.frozen import Leaf, join
from outlast.elastic.silent_faults.finite_check import RunningFiniteCheck
from outlast.elastic.silent_faults.job_checks import JobChecks, check_of
from outlast.elastic.tensors import digest
from outlast.events.emitter import Emitter, MemorySink


class Pair(NamedTuple):
    first: Any
    second: Any


def state_of(tensor: torch.Tensor) -> dict[Any, Any]:
    more = defaultdict(list, {"a": [tensor, tensor]})
    return {
        "plain": {"rate": 0.1, "on": True, "none": None, 3: "text"},
        "nested": [(tensor, [tensor, 1]), (), [], {}],
        "ordered": OrderedDict(b=tensor, a=2),
        "pair": Pair(tensor, (1, tensor)),
        "more": more,
        "queue": deque([tensor, 1]),
        "size": torch.Size([2, 3]),
        "parameter": torch.nn.Parameter(tensor),
        "others": (b"bytes", {1, 2}, np.float64(1.5)),
    }


def test_a_state_is_replaced_as_by_torch() -> None:
    state = state_of(torch.ones(3))
    for value in (state, *state.values()):
        found = replaced(value, torch.Tensor, lambda each: tuple(each.shape))
        expected = tree_map_only(torch.Tensor, lambda each: tuple(each.shape), value)
        assert found == expected
        assert type(found) is type(expected)
    same = replaced(state, torch.Tensor, lambda each: each)
    for name in ("plain", "nested", "ordered", "more", "queue"):
        assert same[name] is not state[name], "a restore adds to these"


def test_the_tensors_come_back_without_a_target() -> None:
    leaves = [torch.full((2,), float(number)) for number in range(2)]
    skeleton = {"a": [Leaf(1, sharded=False), {"b": Leaf(0, sharded=False)}], "c": (1, None)}
    found = join(skeleton, leaves, lambda: pytest.fail("no part of it is sharded"))
    assert found["a"][0] is leaves[1]
    assert found["a"][1]["b"] is leaves[0]
    assert found["c"] == (1, None)
    assert all(not isinstance(each, Leaf) for each in tree_leaves(found))


def test_a_sharded_part_has_to_be_in_the_target() -> None:
    skeleton = {"a": Leaf(0, sharded=False), "b": Leaf(1, sharded=True)}
    with pytest.raises(ValueError, match="sharded tensor differ"):
        join(skeleton, [torch.ones(1), torch.ones(1)], lambda: {"b": torch.ones(1)})


def test_a_digest_is_that_of_the_values_in_their_order() -> None:
    """Whether or not the memory of the tensor has them in this order."""
    table = torch.arange(12.0).view(3, 4)
    complexes = torch.randn(6, dtype=torch.complex64)
    for tensor in (
        table,
        table.t(),
        table[1:],
        table[:, 1],
        torch.ones(1).expand(5),
        complexes.conj(),
        complexes.conj().imag,  # negated when it is read
        torch.nn.Parameter(table),
        torch.empty(0),
    ):
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        content = bytes(plain.flatten().view(torch.uint8).tolist())
        assert digest(tensor) == xxhash.xxh3_64_hexdigest(content)


def test_the_parameters_are_looked_at_once_when_the_checks_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a restore, all of them are summed: a pass over a third of the state."""
    looks: list[int] = []
    look = RunningFiniteCheck.check_all
    monkeypatch.setattr(
        RunningFiniteCheck, "check_all", lambda self: (looks.append(1), look(self))[1]
    )
    module, checks = torch.nn.Linear(2, 2), JobChecks(check_of(()))
    ledger = CallLedger(MemoryStore(), "checks", 0, 1)
    job: Any = SimpleNamespace(emitter=Emitter(MemorySink()))
    checks.start(module, job, ledger, 3, go_back=lambda *_: pytest.fail("it is finite"))
    checks.compare_now(1.0, required=True)
    assert len(looks) == 1
    checks.compare_now(1.0)  # before the last save
    assert len(looks) == 2
    checks.close()
