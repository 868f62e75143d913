"""The policies of nvidia-resiliency-ext 0.4, without a job."""

from __future__ import annotations

import logging
import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from outlast.compat.nvrx.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from outlast.compat.nvrx.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

from outlast.compat.nvrx import inprocess
from outlast.compat.nvrx.inprocess import rank_assignment as ra
from outlast.compat.nvrx.inprocess.rank_assignment import as_core
from outlast.errors import RankDiscarded, RestartAbort
from outlast.inprocess import state as core

State, Mode = inprocess.State, inprocess.Mode


def ctx(rank: int, size: int, gone: set[int] | None = None, **fields: Any) -> Any:
    return ra.RankAssignmentCtx(State(rank, size, **fields), None, gone or set())


def test_ranks_are_moved_and_activated() -> None:
    found = inprocess.Compose(ra.ActivateAllRanks(), ra.ShiftRanks())(ctx(3, 5, {1}))
    state = found.state
    assert (state.rank, state.active_rank, state.world_size, state.active_world_size) == (
        2,
        2,
        4,
        4,
    )
    assert (state.mode, state.initial_rank, found.terminated_ranks) == (Mode.ACTIVE, 3, set())
    assert ra.FillGaps()(ctx(4, 5, {1})).state.rank == 1
    with pytest.raises(RankDiscarded):
        ra.ShiftRanks()(ctx(1, 5, {1}))
    assert ra.ShiftRanks()(ra.RankAssignmentCtx(State(2, 5), None, {})).state.rank == 2  # type: ignore[arg-type]


def test_filters_select_the_lowest_ranks() -> None:
    both = inprocess.Compose(ra.ActiveWorldSizeDivisibleBy(4), ra.MaxActiveWorldSize(7))
    assert both(ctx(3, 9)).state.active_world_size == 4
    out = both(ctx(4, 9)).state
    assert (out.mode, out.active_rank, out.rank) == (Mode.INACTIVE, None, 4)
    with pytest.warns(DeprecationWarning, match="rank_assignment.ActiveWorldSizeDivisibleBy"):
        old = inprocess.rank_filter.WorldSizeDivisibleBy(2)
    assert old(State(0, 3)).active_world_size == 2


def test_a_tree_replaces_from_the_reserve() -> None:
    seen = []

    def key(state: Any) -> int:
        seen.append(type(state))
        return state.rank // 2

    layers = [ra.Layer(max_ranks=2, flag=ra.LayerFlag.RESERVE), ra.Layer(2, None, key)]
    tree = ra.Tree(layers)
    found = tree(ctx(2, 4))
    assert (found.state.mode, found.state.active_world_size) == (Mode.INACTIVE, 2)
    assert set(seen) == {State}


def test_keys_are_counted_in_the_store() -> None:
    store = dist.HashStore()
    counts = ra.FilterCountGroupedByKey(lambda state: state.rank // 2, lambda n: n == 2)
    found = counts(ra.RankAssignmentCtx(State(0, 1), store, set()))
    assert found.terminated_ranks == {0}


def test_gaps_are_filled_as_in_0_4_and_as_it_documents_in_a_job() -> None:
    lost = {1, 4, 5}
    healthy = [rank for rank in range(8) if rank not in lost]
    assert [ra.FillGaps()(ctx(r, 8, lost)).state.rank for r in healthy] == [0, 2, 3, 4, 5]
    assignment = as_core(inprocess.Compose(ra.ActivateAllRanks(), ra.FillGaps()))
    moved = [assignment(core.State(r, 8), frozenset(lost))[0].rank for r in healthy]
    assert moved == [0, 2, 3, 1, 4]


def test_ranks_are_moved_between_two_counts() -> None:
    """Ranks 1 and 6 of 8 are lost: groups of two lose 0, 1, 6 and 7, then a group of three 5."""
    store, gone = dist.HashStore(), {1, 6}

    def of_groups(size: int) -> Any:
        limit = timedelta(seconds=20)
        return ra.FilterCountGroupedByKey(lambda s: (s.rank // size,), size.__eq__, limit)

    def new_rank(rank: int) -> int | None:
        policy = inprocess.Compose(ra.ShiftRanks(), of_groups(3), ra.ShiftRanks(), of_groups(2))
        try:
            found = policy(ra.RankAssignmentCtx(State(rank, 8), store, set(gone)))
        except RankDiscarded:
            return None
        assert (found.state.world_size, found.terminated_ranks) == (3, set())
        return int(found.state.rank)

    healthy = [rank for rank in range(8) if rank not in gone]
    with ThreadPoolExecutor(len(healthy)) as pool:
        assert list(pool.map(new_rank, healthy)) == [None, 0, 1, 2, None, None]


def test_any_value_is_a_group_key() -> None:
    for key in (7, ("a", 1), None):
        counts = ra.FilterCountGroupedByKey(key, lambda n: n == 1)
        found = counts(ra.RankAssignmentCtx(State(0, 1), dist.HashStore(), set()))
        assert found.terminated_ranks == set()
        assert ra.Tree([ra.Layer(key_or_fn=key)])(ctx(1, 2)).state.active_rank == 1


def test_a_wait_for_replacements_beside_any_assignment() -> None:
    policies = inprocess.rank_assignment
    wait, tree = policies.AwaitReplacements(5), policies.Tree([policies.Layer()])
    both = inprocess.Compose(policies.ActivateAllRanks(), wait, policies.ShiftRanks())
    for assignment, first in (
        (inprocess.Compose(wait, tree), "Tree"),
        (both, "CoreAssignment"),
        (wait, "CoreAssignment"),
    ):
        found = inprocess.Wrapper(rank_assignment=assignment)._core
        assert found.settings.await_replacements == 5
        assert type(found.rank_assignment._parts[0]).__name__ == first
    order = [
        type(part).__name__
        for part in inprocess.Wrapper(rank_assignment=both)
        ._core.rank_assignment._parts[0]
        ._assignment._parts
    ]
    assert order == ["ActivateAllRanks", "ShiftRanks"]


def test_a_tree_has_one_root() -> None:
    with pytest.raises(RuntimeError, match="one key in the first layer"):
        ra.Tree([ra.Layer(key_or_fn=lambda state: state.rank % 2)])(ctx(0, 2))


def test_the_state_that_an_assignment_returns_counts() -> None:
    class Leaves(ra.RankAssignment):
        """Closes the gaps, and leaves the terminated ranks in the set."""

        def __call__(self, ctx: Any) -> Any:
            gone = set(ctx.terminated_ranks)
            ctx = ra.ShiftRanks()(ctx)
            ctx.terminated_ranks = gone
            return ctx

    after, left = as_core(Leaves())(core.State(2, 4), frozenset({1}))
    assert (after.rank, after.world_size, left) == (1, 3, frozenset())
    nobody_moved = inprocess.Compose(ra.ActivateAllRanks())
    assert as_core(nobody_moved)(core.State(2, 4), frozenset({1}))[1] == {1}


def test_an_assignment_of_the_user_runs_under_the_wrapper_of_outlast() -> None:
    class Custom(ra.RankAssignment):
        def __call__(self, ctx: Any) -> Any:
            assert ctx.store == "the store"
            ctx.terminated_ranks.add(0)  # it is the user's to change
            ctx = ra.ShiftRanks()(ctx)
            return ra.MaxActiveWorldSize(1)(ctx)

    before = core.State(2, 4, store=core.LazyStore(lambda: "the store"))
    after, left = as_core(Custom())(before, frozenset({1}))
    assert (after.rank, after.world_size, after.active_world_size, left) == (0, 2, 1, frozenset())

    class Swaps(ra.RankAssignment):
        def __call__(self, ctx: Any) -> Any:
            ctx.state.active_rank = ctx.state.rank + 1
            return ctx

    with pytest.raises(ValueError, match="active ranks must be the lowest ranks"):
        as_core(Swaps())(before, frozenset())


def test_states_are_frozen_and_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    state = State.from_env()
    assert (state.rank, state.world_size, state.initial_rank) == (1, 4, 1)
    state.fn_exception = ValueError("x")
    frozen = state.freeze()
    with pytest.raises(AttributeError):
        frozen.rank = 3  # type: ignore[misc]
    state.advance()
    assert (state.iteration, state.fn_exception, frozen.iteration) == (1, None, 0)
    state.copy_from(frozen, ["iteration"])
    assert state.iteration == 0
    state.active_rank, state.active_world_size = 0, 2
    state.set_distributed_vars()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "2")


def test_health_checks_and_finalize_take_and_return_the_state() -> None:
    failed = State(0, 1, fn_exception=ValueError("x")).freeze()
    checks = inprocess.Compose(
        inprocess.health_check.FaultCounter(1), inprocess.health_check.CudaHealthCheck()
    )
    assert checks(failed) is failed
    with pytest.raises(inprocess.health_check.FaultCounterExceeded):
        checks(failed)
    ran: list[int] = []
    finalize = inprocess.finalize.ThreadedFinalize(timedelta(seconds=10), ran.append, (1,))
    assert inprocess.Compose(finalize, finalize)(failed) is failed
    assert ran == [1, 1]
    with pytest.raises(RestartAbort):
        inprocess.initialize.RetryController(max_iterations=1)(State(0, 1, 0, 1, iteration=1))  # type: ignore[arg-type]


def test_transformer_engine_is_aborted_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    abort, state = inprocess.abort.AbortTransformerEngine(), State(0, 1).freeze()
    assert abort(state) is state  # type: ignore[arg-type, comparison-overlap]
    calls: list[str] = []
    base = types.SimpleNamespace(destroy_ub=lambda: calls.append("destroyed"))
    for name in ("", ".pytorch", ".pytorch.module"):
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", types.ModuleType("x"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.base", base)  # type: ignore[arg-type]
    abort(state)  # type: ignore[arg-type]
    assert calls == ["destroyed"]


def test_an_outer_restarter_reads_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outlast.compat.nvrx")
    callback = inprocess.nested_restarter.NestedRestarterHandlingStarting(special_rank=1)
    for rank in (0, 1):
        callback(State(rank, 2).freeze())
    assert caplog.messages == ["[NestedRestarter] name=[InProcess] state=handling stage=starting"]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match="finalize must be a Finalize"):
        inprocess.Wrapper(finalize=print)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rank_assignment"):
        inprocess.Wrapper(rank_assignment=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="heartbeat_interval"):
        inprocess.Wrapper(heartbeat_interval=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="soft_timeout"):
        inprocess.Wrapper(soft_timeout=timedelta(seconds=100))


def test_a_background_call_preloads_and_finalizes(tmp_path: Any) -> None:
    done: list[str] = []
    queue = AsyncCallsQueue(persistent=False)
    request = AsyncRequest(
        torch.save,
        (torch.ones(2), None),
        [lambda: done.append("finalized")],
        preload_fn=lambda: str(tmp_path / "file"),
    )
    request.add_finalize_fn(lambda: done.append("twice"))
    with pytest.raises(RuntimeError, match="frozen"):
        request.freeze().add_finalize_fn(print)
    assert queue.schedule_async_request(request.freeze()) == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    queue.close()
    assert done == ["finalized", "twice"]
    assert torch.load(tmp_path / "file").tolist() == [1, 1]


def test_torch_save_in_the_background(tmp_path: Any) -> None:
    saver = TorchAsyncCheckpoint(persistent_queue=False)
    state = {"weights": torch.ones(3), "step": 4}
    saver.async_save(state, str(tmp_path / "file"))
    state["weights"].zero_()
    saver.finalize_async_save(blocking=True, terminate=True)
    found = torch.load(tmp_path / "file")
    assert (found["weights"].tolist(), found["step"]) == ([1, 1, 1], 4)
    saver.close()


def test_a_queue_is_closed_as_in_later_versions(tmp_path: Any) -> None:
    saver = TorchAsyncCheckpoint(persistent_queue=False)
    saver.async_save({"step": 4}, str(tmp_path / "file"))
    saver.close()
    assert torch.load(tmp_path / "file") == {"step": 4}
    saver = TorchAsyncCheckpoint(persistent_queue=False)
    saver.async_save({"step": 5}, str(tmp_path / "missing" / "file"))
    saver.close(abort=True)  # its error is dropped, too
