"""Which parameters are hashed when, which digests differ, and what the comparison makes of them."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from typing import Any

import hypothesis
import msgspec
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import MemoryStore
from outlast.elastic import ReplicaCheck, StragglerCheck
from outlast.elastic.silent_faults import layout, replica_check
from outlast.elastic.silent_faults.comparison import Judge, Record, Result, compare
from outlast.elastic.silent_faults.digests import cpu_digest, flat_bytes
from outlast.elastic.silent_faults.job_checks import check_of
from outlast.elastic.silent_faults.layout import Layout, Piece
from outlast.elastic.silent_faults.replica_check import RunningReplicaCheck
from outlast.elastic.tensors import column_sums
from outlast.events.emitter import Emitter, MemorySink


class Holder(nn.Module):
    """Parameters of the given shapes."""

    def __init__(self, *parameters: torch.Tensor) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)


def digests(made: Layout) -> list[str]:
    return [cpu_digest(piece, made.parameters) for pieces in made.slices for piece in pieces]


@pytest.mark.parametrize("numel", [1, 9, 2048, 5000])
def test_sums_of_columns_do_not_depend_on_where_in_a_buffer_a_tensor_lies(numel: int) -> None:
    buffer = torch.randn(numel + 3).bfloat16()
    sums = [column_sums(flat_bytes(buffer[at : at + numel].clone())) for at in range(4)]
    for at, expected in enumerate(sums):
        assert torch.equal(column_sums(flat_bytes(buffer[at : at + numel])), expected)


@pytest.mark.parametrize("width", [1, 32, 256, 1000, 1024, 4096, 5120])
def test_sums_of_columns_change_with_the_order_of_rows(width: int) -> None:
    table = torch.randn(48, width)
    sums = [column_sums(flat_bytes(table.roll(count, 0))) for count in (0, 1, 7)]
    assert not torch.equal(sums[0], sums[1])
    assert not torch.equal(sums[0], sums[2])


@hypothesis.given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    every=st.integers(1, 20),
    least=st.sampled_from([1, 256, 1 << 20]),
)
def test_every_byte_is_in_one_slice_and_a_cycle_ends_in_time(
    sizes: list[int], every: int, least: int
) -> None:
    module = Holder(*(torch.zeros(size) for size in sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_LEAST_BYTES", least)
        made = Layout.of(module, every)
    assert 1 <= len(made.slices) <= every
    covered: dict[int, int] = {}
    for pieces in made.slices:
        for piece in pieces:
            for part in piece.parts:
                assert covered.get(part.parameter, 0) == part.begin
                covered[part.parameter] = part.end
    assert [covered[i] for i in range(len(sizes))] == [4 * size for size in sizes]
    assert len(made.labels) == len(set(made.labels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("strided", [False, True])
def test_any_flipped_bit_changes_the_digest_of_its_parameter(
    dtype: torch.dtype, strided: bool
) -> None:
    tensor = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5).to(dtype)
    if strided:
        tensor = tensor.to(memory_format=torch.channels_last)
    parameter = nn.Parameter(tensor, requires_grad=False)
    made = Layout.of(Holder(torch.zeros(7), parameter), 10)
    before = digests(made)
    content = flat_bytes(parameter)
    for byte in (0, len(content) // 2, len(content) - 1):
        content[byte] ^= 4
        after = digests(made)
        assert [a == b for a, b in zip(before, after, strict=True)] == [True, False]
        content[byte] ^= 4
    assert digests(made) == before


def record(*digests: str | None, first: int = 10, signature: str = "s") -> Record:
    return Record(signature, "host", first, [1] * len(digests), list(digests))


def test_the_majority_outvotes_each_piece() -> None:
    found = compare([record("a", "b"), record("a", "x"), record("y", "b"), record("a", "b")])
    assert [(d.ranks, d.majority, d.pieces, d.step) for d in found] == [([1, 2], True, [0, 1], 10)]


def test_two_against_two_is_no_majority() -> None:
    (found,) = compare([record("a", "b"), record("a", "b"), record("a", "c"), record("a", "c")])
    assert (found.ranks, found.majority, found.pieces, found.step) == ([0, 1, 2, 3], False, [1], 11)


def test_ranks_with_other_parameters_are_not_compared() -> None:
    shards = [record("a", signature="0"), record("b", signature="1")]
    assert compare([*shards, *shards]) == []
    (found,) = compare([*shards, shards[0], record("c", signature="1")])
    assert (found.replicas, found.ranks) == ([1, 3], [1, 3])


def test_a_cycle_with_skipped_pieces_is_not_the_newest_clean_one() -> None:
    judge = Judge(0)

    def judged(*records: Record) -> Result:
        return judge(records)

    assert judged(record("a", first=10), record("a", first=10)).clean_step == 10
    assert judged(record(None, first=20), record("b", first=20)).clean_step == 10
    different = judged(record("a", first=30), record("b", first=30))
    assert (different.clean_step, len(different.differences)) == (10, 1)


def published(ledger: CallLedger, number: int) -> Record:
    return msgspec.json.decode(ledger.round(number).part(0), type=Record)


def run_alone_as_two(
    module: nn.Module, optimizer: torch.optim.Optimizer, between: Any, steps: int, every: int = 2
) -> list[Record]:
    """The records that rank 0 of two publishes; `between` is called between two steps."""
    store = MemoryStore()
    ledger = CallLedger(store, "test", 0, 2)
    check = ReplicaCheck(every=every)
    running = RunningReplicaCheck(check, module, ledger, Emitter(MemorySink()), 0)
    with running:
        for _ in range(steps):
            sum(p.sum() for p in module.parameters()).backward()
            optimizer.step()
            running.step()
            between()
    return [published(ledger, i) for i in range(8) if ledger.round(i).part(0)]


def test_parameters_that_are_written_to_between_two_steps_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def scale() -> None:
        with torch.no_grad():
            module.weight.mul_(2)

    with caplog.at_level(logging.WARNING, "outlast.elastic"):
        records = run_alone_as_two(module, optimizer, scale, 8)
    assert len(records) >= 3
    assert all(each.digests == [None, None] for each in records)
    assert [m for m in caplog.messages if "written to between" in m] == caplog.messages[:1]
    clean = run_alone_as_two(module, optimizer, lambda: None, 8)
    assert all(None not in each.digests for each in clean)
    assert [each.first for each in clean] == [2, 4, 6]


def test_the_optimizer_waits_for_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests made by a thread that is held up are of the state before the next step."""

    def late(piece: Piece, tensors: Any) -> str:
        time.sleep(0.05)
        return cpu_digest(piece, tensors)

    monkeypatch.setattr(replica_check, "cpu_digest", late)
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    expected = []

    def note() -> None:
        expected.append(digests(Layout.of(module, 2)))

    records = run_alone_as_two(module, optimizer, note, 8)
    assert [each.digests for each in records] == [expected[each.first - 1] for each in records]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: ReplicaCheck(every=0), "^every must be at least 1"),
        (lambda: ReplicaCheck(on_mismatch="stop"), "^on_mismatch must be 'report', 'exclude' or a"),
        (lambda: StragglerCheck(window=0), "^window must be at least 1"),
        (lambda: StragglerCheck(factor=1.0), "^factor must be greater than 1, not 1.0"),
        (lambda: check_of([ReplicaCheck(), ReplicaCheck()]), "^checks has two of one kind"),
        (
            lambda: check_of([1]),
            "^checks must be FiniteCheck, ReplicaCheck and StragglerCheck, not 1",
        ),  # type: ignore[list-item]
    ],
)
def test_wrong_arguments_are_refused(made: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        made()


def test_results_are_json() -> None:
    result = Judge(3)([record("a")])
    assert json.loads(msgspec.json.encode(result))["clean_step"] == 10


@pytest.mark.parametrize(("every", "first"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4]), (3, [3])])
def test_cycles_as_long_as_the_interval_are_all_published(
    monkeypatch: pytest.MonkeyPatch, every: int, first: list[int]
) -> None:
    monkeypatch.setattr(layout, "_LEAST_BYTES", 1)
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    records = run_alone_as_two(module, optimizer, lambda: None, 6, every)
    assert [each.first for each in records] == first
    assert all(len(each.slices) == every for each in records)


def test_a_rank_without_parameters_takes_part_in_every_round() -> None:
    held = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(held.parameters(), lr=0.1)
    store = MemoryStore()
    ledger = CallLedger(store, "test", 0, 2)
    check = ReplicaCheck(every=2)
    with RunningReplicaCheck(check, nn.ReLU(), ledger, Emitter(MemorySink()), 0) as running:
        for _ in range(5):
            sum(p.sum() for p in held.parameters()).backward()
            optimizer.step()
            running.step()
    assert [published(ledger, i).digests for i in range(2)] == [[], []]


def test_replicas_of_ranks_that_are_not_at_the_same_step_are_no_fault_of_the_hardware(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def judged(judge: Judge, digest: str, batches: int, first: int) -> Result:
        own = dataclasses.replace(record(digest, first=first), batches=batches)
        return judge([record("a", first=10), own])

    judge = Judge(3)
    for batches, first in ((1, 10), (0, 12)):
        result = judged(judge, "x", batches, first)
        assert (result.differences, result.clean_step) == ([], 3)
        assert f"step {first}, {batches} batches taken" in caplog.text
    assert judged(judge, "x", 0, 10).differences
    caplog.clear()
    assert judged(judge, "a", 1, 10).clean_step == 10  # each rank takes as many as it likes
    assert not caplog.text
