"""The policies of nvidia-resiliency-ext 0.4, without a job."""

from __future__ import annotations

import filecmp
import logging
import os
import shutil
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from outlast.compat.nvrx.checkpointing.async_ckpt.core import (
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
)
from outlast.compat.nvrx.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

from outlast.compat.nvrx import inprocess
from outlast.compat.nvrx.inprocess import rank_assignment as ra
from outlast.compat.nvrx.inprocess.rank_assignment import as_core
from outlast.coordination.decision import ViewRecord
from outlast.errors import RankDiscarded, RestartAbort, RestartError
from outlast.inprocess import state as core
from outlast.inprocess.recovery.next_ranks import state_in_view

State, Mode = inprocess.State, inprocess.Mode


def ctx(rank: int, size: int, gone: set[int] | None = None, **fields: Any) -> Any:
    return ra.RankAssignmentCtx(State(rank, size, **fields), None, gone or set())


def in_job(assignment: Any, rank: int, size: int, gone: set[int]) -> core.State:
    """The state that a wrapped call gets from the assignment."""
    record = ViewRecord(1, tuple(range(size)), frozenset(gone))
    return state_in_view(record, rank, core.State(rank, size, store=object()), as_core(assignment))


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
    assignment = inprocess.Compose(ra.ActivateAllRanks(), ra.FillGaps())
    moved = [in_job(assignment, r, 8, lost).rank for r in healthy]
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

    after = in_job(Leaves(), 2, 4, {1})
    assert (after.rank, after.world_size) == (1, 3)
    with pytest.raises(RestartError, match=r"ranks \[1\] unhandled"):
        in_job(inprocess.Compose(ra.ActivateAllRanks()), 2, 4, {1})


def test_what_is_left_in_the_context_may_be_anything() -> None:
    class Leaves(ra.RankAssignment):
        def __init__(self, left: Any) -> None:
            self.left = left

        def __call__(self, ctx: Any) -> Any:
            ctx = ra.ShiftRanks()(ctx)
            ctx.terminated_ranks = self.left
            return ctx

    for left in (None, [1], {1: "lost"}, {1}):
        assert in_job(Leaves(left), 2, 4, {1}).rank == 1


@pytest.mark.parametrize("returned", [None, core.State(0, 1), 3, types.SimpleNamespace(state=None)])
def test_an_assignment_that_returns_no_context_is_named(returned: Any) -> None:
    class Wrong(ra.RankAssignment):
        def __call__(self, ctx: Any) -> Any:
            return returned

    with pytest.raises(TypeError, match=r"Wrong object .* must return the context .* not"):
        in_job(Wrong(), 2, 4, {1})


def test_a_filter_that_returns_no_state_is_named_and_all_others_may_return_anything() -> None:
    class Wrong(
        inprocess.rank_filter.RankFilter,
        inprocess.finalize.Finalize,
        inprocess.initialize.Initialize,
    ):
        def __call__(self, state: Any) -> Any:
            return "nothing"

    with pytest.warns(DeprecationWarning, match="rank_filter"):
        settings = inprocess.Wrapper(
            rank_filter=Wrong(), finalize=Wrong(), initialize=Wrong()
        )._core.settings
    state = core.State(0, 1)
    assert settings.initialize(state) is state
    assert settings.finalize(state, None) == (state, None)
    with pytest.raises(TypeError, match=r"Wrong object .* must return the state, not 'nothing'"):
        settings.rank_filter(state)


def test_no_rank_is_active_by_mistake() -> None:
    with pytest.raises(RestartAbort, match="none of 3 ranks active"):
        in_job(inprocess.Compose(ra.ActiveWorldSizeDivisibleBy(4), ra.ShiftRanks()), 2, 4, {1})


def test_an_assignment_of_the_user_runs_under_the_wrapper_of_outlast() -> None:
    class Custom(ra.RankAssignment):
        def __call__(self, ctx: Any) -> Any:
            assert ctx.store == "the store"
            ctx.terminated_ranks.add(0)  # it is the user's to change
            ctx = ra.ShiftRanks()(ctx)
            return ra.MaxActiveWorldSize(1)(ctx)

    before = core.State(2, 4, store=core.LazyStore(lambda: "the store"))
    after, left = as_core(Custom())(before, {1})
    assert (after.rank, after.world_size, after.active_world_size, left) == (0, 2, 1, set())

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


@pytest.mark.parametrize("make", [TemporalAsyncCaller, PersistentAsyncCaller])
def test_a_caller_runs_one_request_after_another(make: Any, tmp_path: Any) -> None:
    caller = make()
    assert isinstance(caller, AsyncCaller)
    assert caller.is_current_async_call_done()
    for n in range(2):
        path = str(tmp_path / str(n))
        # Not torch.save, for which a worker would import torch.
        request = AsyncRequest(shutil.copyfile, (__file__, None), [], {}, lambda path=path: path)
        caller.schedule_async_call(request)
        if n:
            assert caller.is_current_async_call_done(blocking=True)
        caller.close()  # waits
        assert filecmp.cmp(path, __file__)
    assert caller.sync_all_async_calls(False)
    assert not caller.sync_all_async_calls(1)
    caller.schedule_async_call(AsyncRequest(time.sleep, (1e6,), []))
    assert not caller.is_current_async_call_done()
    caller.close(abort=True)
    assert caller.process is None


@pytest.mark.parametrize("abort", [False, True])
def test_a_closed_queue_and_a_closed_torch_checkpoint_can_be_used_again(
    abort: bool, tmp_path: Any
) -> None:
    saver = TorchAsyncCheckpoint(persistent_queue=False)
    for n in range(2):
        saver.async_save({"n": n}, str(tmp_path / "file"))
        saver.close(abort=abort)
    if not abort:
        assert torch.load(tmp_path / "file") == {"n": 1}
    queue = AsyncCallsQueue(False, cpu_priority=19)
    for _ in range(2):
        for _ in range(2):
            index = queue.schedule_async_request(AsyncRequest(None, (), []))
        assert (index, queue.get_num_unfinalized_calls()) == (1, 2)
        queue.close(abort)
    assert queue.get_num_unfinalized_calls() == 0
