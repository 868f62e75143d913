"""`Wrapper`: the decorator that restarts a function in place after a fault."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from outlast.coordination.repeated_faults import RepeatedFaults
from outlast.events.emitter import Sink
from outlast.inprocess.abort import Abort, AbortTorchDistributed
from outlast.inprocess.call_wrapper import CallWrapper
from outlast.inprocess.ending import Completion, Terminate
from outlast.inprocess.environment import launched_job
from outlast.inprocess.finalize import Finalize
from outlast.inprocess.health_check import HealthCheck
from outlast.inprocess.initialize import Initialize
from outlast.inprocess.interruption.error_kinds import remove_own_frames
from outlast.inprocess.interruption.program_stores import ProgramStores
from outlast.inprocess.rank_assignment import RankAssignment, ShiftRanks
from outlast.inprocess.rank_filter import RankFilter
from outlast.inprocess.recovery.host_protocol import GrowPolicy
from outlast.inprocess.recovery.session import run_call
from outlast.inprocess.recovery.settings import Settings
from outlast.inprocess.store import StoreMixin, TCPStore
from outlast.inprocess.timeouts import Timeouts
from outlast.system.arguments import check_options, options_of
from outlast.system.departure import tell_end_of_script

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")

_HINT = "a parameter gets the CallWrapper if it is annotated with it, as in `call: CallWrapper`"


def _with_durations(init: F) -> F:
    """`init` with a signature that names each duration, for `help()`."""
    signature = inspect.signature(init)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters += [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type
        )
        for f in dataclasses.fields(Timeouts)
    ]
    init.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return init


class Wrapper:
    """Restarts the decorated function in place, in the same processes, on a fault of any rank.

    On a fault, the function is restarted on all healthy ranks at once. Terminated, missing and
    unhealthy ranks are left out; processes that ask to join are admitted. This is repeated until
    every rank has completed, or a condition ends the job. The decorated function returns the
    function's value; on reserve ranks it returns `None`.

    An iteration consists of: barrier, `initialize`, `health_check`, the function (or the wait of a
    reserve rank), completion. After a fault: the fault is recorded, `abort`, the function is
    interrupted, `finalize`, `health_check`, barrier, `rank_assignment`, `rank_filter`, next
    iteration. `RANK` and `WORLD_SIZE` are set before the function is called; the function creates
    its own process group.

    The function gets its `CallWrapper` for a parameter that is annotated with that class, or for an
    unannotated parameter named `call` (without a default, or with `None`) that its caller does not
    pass. `@Wrapper` without parentheses is `@Wrapper()`.

    Args:
        store_factory: a subclass of `StoreMixin`; creates the store of the job.
        store_kwargs: keyword arguments for `store_factory` (`host_name=`, `port=`). Under
            `outlast run` the store is the launcher's, and these two have no effect.
        initialize: rank-local; runs before the function in every iteration.
        abort: ends in-flight work, from another thread.
        finalize: rank-local; runs after the abort, to prepare the process for a restart.
        health_check: rank-local; before the function, where a failure restarts all ranks, and after
            `finalize`, where it excludes this rank.
        rank_assignment: gives the ranks and the world size of the next iteration.
        rank_filter: selects the ranks that call the function; the others are a warm reserve.
        timeouts: the durations.
        monitor_process_logfile: absolute path; `{rank}` is replaced by the initial rank.
        enabled: `False` returns the function unchanged.
        grow_policy: when a process that asks to join is admitted.
        repeated_faults: when faults that come back end the job; `None` restarts without limit. A
            `RetryController` in `initialize` replaces it.
        event_sink: where events go; by default a file in `OUTLAST_EVENTS_DIR`, if that is set.
        completion: rank-local; runs when all ranks have completed.
        terminate: rank-local; runs when this rank leaves the job with an exception.
        soft_timeout, ...: each attribute of `Timeouts`: it replaces that of `timeouts`.

    Each argument is an attribute of the `Wrapper`; a duration is a `datetime.timedelta` there.

    Raises:
        TypeError, ValueError: naming the invalid argument. The decorated function raises a
            `ValueError` if `torch.distributed` is initialized when it is called.
    """

    @_with_durations
    def __init__(
        self,
        *,
        store_factory: type[StoreMixin] = TCPStore,
        store_kwargs: Mapping[str, Any] | None = None,
        initialize: Initialize | None = None,
        abort: Abort | None = AbortTorchDistributed(),  # noqa: B008 - keeps no state of a call
        finalize: Finalize | None = None,
        health_check: HealthCheck | None = None,
        rank_assignment: RankAssignment = ShiftRanks(),  # noqa: B008
        rank_filter: RankFilter | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - immutable
        monitor_process_logfile: str | None = None,
        enabled: bool = True,
        grow_policy: GrowPolicy = GrowPolicy.AT_ONCE,
        repeated_faults: RepeatedFaults | None = RepeatedFaults(),  # noqa: B008 - immutable
        event_sink: Sink | None = None,
        completion: Completion | None = None,
        terminate: Terminate | None = None,
        **durations: Any,
    ) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled must be a bool, not {enabled!r}")
        if not isinstance(timeouts, Timeouts):
            raise TypeError(f"timeouts must be a Timeouts, not {timeouts!r}")
        check_options("Wrapper", durations, options_of(Wrapper.__init__) - {"self"})
        tell_end_of_script(launched_job())
        self.enabled, self.event_sink = enabled, event_sink
        self.settings = Settings(
            store_factory=store_factory,
            store_kwargs={} if store_kwargs is None else store_kwargs,
            initialize=initialize,
            abort=abort,
            finalize=finalize,
            health_check=health_check,
            rank_assignment=rank_assignment,
            rank_filter=rank_filter,
            timeouts=dataclasses.replace(timeouts, **durations),
            monitor_process_logfile=monitor_process_logfile,
            grow_policy=grow_policy,
            completion=completion,
            terminate=terminate,
            repeated_faults=repeated_faults,
        )

    def __getattr__(self, name: str) -> Any:
        settings = self.__dict__.get("settings")
        for values in () if settings is None else (settings, settings.timeouts):
            if any(each.name == name for each in dataclasses.fields(values)):
                return getattr(values, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # Hidden from type checkers, for which `@Wrapper` without parentheses is an error.
    if not TYPE_CHECKING:

        @functools.wraps(__init__)  # for `inspect.signature`
        def __new__(cls, *function: Any, **arguments: Any) -> Any:
            if not function:
                return super().__new__(cls)
            if len(function) > 1:
                raise TypeError(f"Wrapper takes keyword arguments only, not {function!r}")
            return cls(**arguments)(*function)

    # For type checkers: the caller of the decorated function does not pass its first parameter
    # `call: CallWrapper`.
    @overload
    def __call__(self, function: Callable[Concatenate[CallWrapper, P], R]) -> Callable[P, R]: ...

    @overload
    def __call__(self, function: F) -> F: ...

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(function):
            raise TypeError(f"Wrapper decorates a function, not {function!r}")
        lazy = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
        if any(is_lazy(function) for is_lazy in lazy):
            raise TypeError(
                f"Wrapper decorates a plain function, not the coroutine or generator function "
                f"{function!r}: a call of it returns before it has run"
            )
        if not self.enabled:
            return function
        signature = _signature(function)
        annotated = _call_wrapper_parameters(function, signature)
        name = getattr(function, "__qualname__", repr(function))

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            wanted = annotated
            if signature is not None:
                # Invalid arguments would fail in every iteration: they fail here, once.
                try:
                    if not wanted and _takes_call_by_name(signature, args, kwargs):
                        wanted = ["call"]
                    given, named = _with_call(signature, args, kwargs, wanted, None)
                    signature.bind(*given, **named)
                except TypeError as e:
                    hint = f"; {_HINT}" if "missing" in str(e) and not wanted else ""
                    raise TypeError(f"{name}(): {e}{hint}") from None

            def once(call: CallWrapper) -> Any:
                given, named = _with_call(signature, args, kwargs, wanted, call)
                return function(*given, **named)

            try:
                stores = ProgramStores(args, kwargs)
                return run_call(self.settings, once, name, self.event_sink, stores)
            except BaseException as error:
                remove_own_frames(error)
                raise error

        return wrapped


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None  # a builtin without a signature


def _call_wrapper_parameters(
    function: Callable[..., Any], signature: inspect.Signature | None
) -> list[str]:
    """The names of the parameters annotated `CallWrapper` or `Optional[CallWrapper]`."""
    if signature is None:
        return []
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 - evaluating annotations may raise anything
        hints = {}
    names = []
    for name, parameter in signature.parameters.items():
        if not _is_call_wrapper(hints.get(name, parameter.annotation)):
            continue
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise TypeError(f"{name}: the CallWrapper cannot be a positional-only parameter")
        names.append(name)
    return names


def _takes_call_by_name(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether the function has an unannotated parameter `call` that these arguments do not give."""
    parameter = signature.parameters.get("call")
    return (
        parameter is not None
        and parameter.annotation is parameter.empty
        and parameter.default in (parameter.empty, None)
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and "call" not in signature.bind_partial(*args, **kwargs).arguments
    )


def _with_call(
    signature: inspect.Signature | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    wanted: Sequence[str],
    call: CallWrapper | None,
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, with `call` for the `wanted` parameters: by position where others follow."""
    given, named = list(args), {**kwargs, **dict.fromkeys(wanted, call)}
    for index, name in enumerate(() if signature is None else signature.parameters):
        if name in wanted and index < len(given):
            given.insert(index, named.pop(name))
    return given, named


def _is_call_wrapper(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return re.search(r"\bCallWrapper\b", annotation) is not None
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return annotation is CallWrapper or (union and CallWrapper in typing.get_args(annotation))
