"""The decorator: what it passes to the function, what it leaves unchanged, a job of one rank."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable
from typing import Any, Optional

import psutil
import pytest
import torch

from outlast.errors import RestartAbort, StoreError
from outlast.inprocess import CallWrapper, Wrapper, wrapper
from outlast.inprocess.initialize import Initialize, RetryController
from outlast.inprocess.state import State

PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OTHERS = (
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "OUTLAST_REPLACEMENT",
    "OUTLAST_EVENTS_DIR",
)
CALL: Any = object()


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PLACE + OTHERS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function is called at once, with `CALL` for its call wrapper."""

    def run_call(
        settings: Any, function: Callable[[Any], Any], name: str, sink: Any, stores: Any
    ) -> Any:
        return function(CALL)

    monkeypatch.setattr(wrapper, "run_call", run_call)


def plain(first: int, call: CallWrapper) -> Any:
    return first, call


def by_union(first: int, call: CallWrapper | None = None) -> Any:
    return first, call


def by_optional(first: int, call: Optional[CallWrapper] = None) -> Any:  # noqa: UP045
    return first, call


def by_keyword(first: int, *, call: CallWrapper) -> Any:
    return first, call


def unresolved(first: Missing, call: CallWrapper) -> Any:  # type: ignore[name-defined] # noqa: F821
    return first, call


def as_object(first: int, call: Any = None) -> Any:
    return first, call


as_object.__annotations__["call"] = CallWrapper


@pytest.mark.usefixtures("called")
@pytest.mark.parametrize(
    "function", [plain, by_union, by_optional, by_keyword, unresolved, as_object]
)
def test_the_call_wrapper_is_passed_by_annotation(function: Callable[..., Any]) -> None:
    assert Wrapper()(function)(7) == (7, CALL)


@pytest.mark.usefixtures("called")
def test_arguments_by_position_may_follow_the_call_wrapper() -> None:
    @Wrapper()
    def first(call: CallWrapper, one: int, two: int = 2) -> tuple[CallWrapper, int, int]:
        return call, one, two

    @Wrapper()
    def second(one: int, call: CallWrapper, *more: int) -> tuple[int, CallWrapper, Any]:
        return one, call, more

    given: Any = second  # its type says that the CallWrapper is given by the caller
    assert first(1) == (CALL, 1, 2)
    assert first(1, two=3) == (CALL, 1, 3)
    assert given(1) == (1, CALL, ())
    assert given(1, 2, 3) == (1, CALL, (2, 3))


def by_name(first, call):  # type: ignore[no-untyped-def]
    return first, call


def by_name_and_default(first, *, call=None):  # type: ignore[no-untyped-def]
    return first, call


@pytest.mark.usefixtures("called")
@pytest.mark.parametrize("function", [by_name, by_name_and_default])
def test_the_call_wrapper_is_passed_by_name(function: Callable[..., Any]) -> None:
    assert Wrapper()(function)(7) == (7, CALL)
    assert Wrapper()(function)(7, call="given") == (7, "given")


@pytest.mark.usefixtures("called")
def test_an_argument_call_of_another_kind_is_the_callers() -> None:
    assert Wrapper()(lambda call="mine": call)() == "mine"
    assert Wrapper()(lambda *call: call)(1, 2) == (1, 2)

    @Wrapper()
    def typed(call: str) -> str:
        return call

    assert typed("given") == "given"


@pytest.mark.usefixtures("called")
def test_without_parentheses_it_decorates_too() -> None:
    @Wrapper  # type: ignore[call-arg, arg-type]
    def function(call):  # type: ignore[no-untyped-def]
        return call

    assert function() is CALL
    assert Wrapper(plain, enabled=False) is plain  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="Wrapper decorates a function, not 3"):
        Wrapper(3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="keyword arguments only"):
        Wrapper(plain, plain)  # type: ignore[call-arg]
    kinds = {p.kind for p in inspect.signature(Wrapper).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.usefixtures("called")
def test_other_arguments_are_passed_as_they_are() -> None:
    @Wrapper()
    def function(a: CallWrapperLike, *rest: int, call: str = "mine", **more: int) -> Any:  # type: ignore[name-defined] # noqa: F821
        return a, rest, call, more

    assert function(1, 2, 3, x=4) == (1, (2, 3), "mine", {"x": 4})
    assert Wrapper()(max)(3, 5) == 5  # a builtin: no annotations, no signature


def test_disabled_it_is_the_function_itself() -> None:
    assert Wrapper(enabled=False)(plain) is plain


def test_the_wrapped_function_looks_like_the_function() -> None:
    wrapped = Wrapper()(plain)
    assert wrapped is not plain
    assert (wrapped.__name__, wrapped.__module__) == ("plain", __name__)
    assert wrapped.__wrapped__ is plain  # type: ignore[attr-defined]


def test_misuse_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="decorates a function, not 3"):
        Wrapper()(3)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="enabled must be a bool, not 1"):
        Wrapper(enabled=1)  # type: ignore[arg-type]


def test_one_rank_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    @Wrapper()
    def function(first: int, call: CallWrapper) -> Any:
        place = (os.environ["RANK"], os.environ["WORLD_SIZE"])
        return first, place, call.state.rank, call.state.world_size, call.iteration

    monkeypatch.setenv("WORLD_SIZE", "1")
    assert function(7) == (7, ("0", "1"), 0, 1, 0)  # type: ignore[call-arg]
    assert {name: os.environ.get(name) for name in PLACE} == dict.fromkeys(PLACE) | {
        "WORLD_SIZE": "1"
    }


def test_after_an_exception_it_starts_again_in_the_same_process() -> None:
    pids: list[int] = []

    @Wrapper()
    def function(call: CallWrapper) -> int:
        pids.append(os.getpid())
        if call.iteration < 2:
            raise KeyError(call.iteration)
        return call.iteration

    assert function() == 2  # type: ignore[call-arg]
    assert pids == [os.getpid()] * 3


def test_modes_of_torch_that_a_fault_left_changed_are_restored() -> None:
    """As an interrupt at the first instruction of `no_grad.__exit__` leaves them."""
    modes: list[tuple[bool, bool, torch.dtype, bool]] = []

    @Wrapper()
    def function(call: CallWrapper) -> None:
        cpu = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        modes.append((torch.is_grad_enabled(), *cpu, torch.is_autocast_cache_enabled()))
        if call.iteration < 2:
            torch.no_grad().__enter__()
            torch.autocast("cpu", torch.float16, cache_enabled=False).__enter__()
            raise KeyError(call.iteration)

    function()  # type: ignore[call-arg]
    assert modes == [(True, False, torch.bfloat16, True)] * 3


def default_device() -> None:
    torch.set_default_device("meta")


def device_of_a_block() -> None:
    torch.device("meta").__enter__()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("change", [default_device, device_of_a_block])
def test_a_fault_in_the_making_of_a_model_leaves_no_other_defaults(
    change: Callable[[], None],
) -> None:
    made: list[tuple[torch.dtype, torch.device]] = []

    @Wrapper()
    def function(call: CallWrapper) -> None:
        data = torch.zeros(1)
        made.append((data.dtype, data.device))
        if call.iteration < 2:
            torch.set_default_dtype(torch.bfloat16)
            change()
            raise KeyError(call.iteration)

    function()  # type: ignore[call-arg]
    assert made == [(torch.float32, torch.device("cpu"))] * 3


def test_the_environment_is_given_back_after_an_error_too() -> None:
    monitors: list[Any] = []

    @Wrapper(initialize=RetryController(max_iterations=1))
    def function(call: CallWrapper) -> None:
        monitors.append(call.monitor_pid)
        raise KeyError("always")

    with pytest.raises(RestartAbort):
        function()  # type: ignore[call-arg]
    # No one waits for the monitor: it serves the store as long as others need it.
    os.waitpid(monitors[0], 0)
    assert {name: os.environ.get(name) for name in PLACE} == dict.fromkeys(PLACE)


def test_no_thread_outlives_a_call_that_loses_its_store_before_the_function() -> None:
    class Loses(Initialize):
        def __call__(self, state: State) -> State:
            (monitor,) = set(psutil.Process().children()) - before
            monitor.kill()  # it serves the store
            monitor.wait()
            raise OSError("a planned fault")

    @Wrapper(initialize=Loses())
    def function(call: CallWrapper) -> None: ...

    before = set(psutil.Process().children())
    with pytest.raises(StoreError, match="cannot be reached"):
        function()  # type: ignore[call-arg]
    assert [t.name for t in threading.enumerate() if t.name.startswith("outlast")] == []


def test_a_call_that_does_not_fit_fails_once_and_at_once() -> None:
    @Wrapper()
    def two(a: int, call: CallWrapper) -> int:
        return a

    with pytest.raises(TypeError, match="missing a required argument"):
        two()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="too many positional arguments"):
        two(1, None)  # type: ignore[arg-type]


def test_a_positional_only_call_wrapper_is_refused() -> None:
    def function(call: CallWrapper, /) -> None: ...

    with pytest.raises(TypeError, match="positional-only"):
        Wrapper()(function)


@pytest.mark.usefixtures("called")
def test_a_missing_argument_hints_at_the_annotation() -> None:
    def unannotated(wrapper): ...  # type: ignore[no-untyped-def]

    def annotated(wrapper: CallWrapper, data: int) -> None: ...

    hint = "annotated with it, as in `call: CallWrapper`"
    with pytest.raises(TypeError, match=rf"unannotated\(\): missing .* 'wrapper'; .*{hint}$"):
        Wrapper()(unannotated)()
    with pytest.raises(TypeError, match=r"annotated\(\): missing .* 'data'$"):
        Wrapper()(annotated)()
    with pytest.raises(TypeError, match=r"unannotated\(\): too many positional arguments$"):
        Wrapper()(unannotated)(1, 2)
