"""An exception on its way out of the function is found only if nothing there catches it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from outlast.inprocess.interruption.in_flight import leaving
from outlast.inprocess.interruption.interrupter import Interrupter


class Waiter:
    """Runs a function as the wrapper does, in a thread that waits where the function calls `wait`.
    What is seen of it there is in `seen`.
    """

    def __init__(self, function: Callable[[Callable[[], None]], None]) -> None:
        self._waits, self._go_on = threading.Event(), threading.Event()
        self._ended: BaseException | None = None
        thread = threading.Thread(target=self._run, args=(function,))
        thread.start()
        assert self._waits.wait(30)
        assert thread.ident is not None
        self.seen = leaving(thread.ident)
        self._go_on.set()
        thread.join()

    @property
    def raised(self) -> BaseException | None:
        """What the function has raised in the end."""
        return self._ended

    def _run(self, function: Callable[[Callable[[], None]], None]) -> None:
        _, self._ended = Interrupter().run(lambda: function(self._wait))

    def _wait(self) -> None:
        self._waits.set()
        assert self._go_on.wait(30)


@contextlib.contextmanager
def waits_at_its_end(wait: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    finally:
        wait()


class Swallows:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> bool:
        return True


def in_finally(wait: Callable[[], None]) -> None:
    try:
        raise KeyError("x")
    finally:
        wait()


def in_a_handler_that_raises(wait: Callable[[], None]) -> None:
    try:
        raise KeyError("x")
    except LookupError:
        wait()
        raise


def in_an_inner_try(wait: Callable[[], None]) -> None:
    try:
        raise KeyError("x")
    finally:
        with contextlib.suppress(KeyError):
            try:
                wait()
            except ZeroDivisionError:
                print()


def under_handlers_of_others(wait: Callable[[], None]) -> None:
    try:
        try:
            in_finally(wait)
        except (OSError, threading.BrokenBarrierError):
            print("not reached")
    except KeyError:
        print("logged")
        raise


def in_a_context_manager(wait: Callable[[], None]) -> None:
    with waits_at_its_end(wait), threading.Lock():
        raise KeyError("x")


def through_known_managers(wait: Callable[[], None]) -> None:
    with threading.Lock(), contextlib.nullcontext():
        in_finally(wait)


def in_a_function_made_in_a_try(wait: Callable[[], None]) -> None:
    try:

        def inner() -> None:
            in_finally(wait)

    except KeyError:
        print()
    inner()


def in_a_loop_that_goes_on(wait: Callable[[], None]) -> None:
    for _ in range(1):
        try:
            in_finally(wait)
        except KeyError:
            continue


def in_a_handler_that_ends(wait: Callable[[], None]) -> None:
    try:
        raise KeyError("x")
    except KeyError:
        wait()


def in_a_finally_that_returns(wait: Callable[[], None]) -> None:
    try:
        raise KeyError("x")
    finally:
        wait()
        return  # noqa: B012


def under_a_finally_that_returns(wait: Callable[[], None]) -> None:
    try:
        in_finally(wait)
    finally:
        return  # noqa: B012


def raised_and_handled_in_a_finally(wait: Callable[[], None]) -> None:
    try:
        print()
    finally:
        try:
            raise KeyError("x")
        except KeyError:
            wait()


def under_code_without_source(wait: Callable[[], None]) -> None:
    exec("in_finally(wait)", {"wait": wait, "in_finally": in_finally})


def caught_by_name(wait: Callable[[], None]) -> None:
    kinds = (LookupError,)
    try:
        in_finally(wait)
    except kinds:
        print()


def caught_bare(wait: Callable[[], None]) -> None:
    try:
        in_finally(wait)
    except:  # noqa: E722
        print()


def swallowed_by_a_manager(wait: Callable[[], None]) -> None:
    with Swallows():
        in_finally(wait)


def suppressed(wait: Callable[[], None]) -> None:
    with contextlib.suppress(KeyError):
        in_finally(wait)


def suppressed_by_a_stack(wait: Callable[[], None]) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(KeyError))
        in_finally(wait)


@contextlib.contextmanager
def swallows() -> Iterator[None]:
    with contextlib.suppress(KeyError):
        yield


def swallowed_by_a_manager_made_before(wait: Callable[[], None]) -> None:
    manager = swallows()
    with manager:
        in_finally(wait)


def in_a_handler_that_raises_another(wait: Callable[[], None]) -> None:
    try:
        try:
            raise KeyError("x")
        except KeyError as error:
            wait()
            raise ValueError("y") from error
    except ValueError:
        print()


def at_the_end_of_a_for(wait: Callable[[], None]) -> None:
    class Batches:
        def __iter__(self) -> Batches:
            return self

        def __next__(self) -> int:
            try:
                return next(iter(()))
            finally:
                wait()

    for _ in Batches():
        pass


def told_to_stop(wait: Callable[[], None]) -> None:
    try:
        raise SystemExit(143)
    finally:
        wait()


def without_source(wait: Callable[[], None]) -> None:
    exec("try:\n    raise KeyError('x')\nfinally:\n    wait()", {"wait": wait})


def nothing_raised(wait: Callable[[], None]) -> None:
    wait()


def an_echo(wait: Callable[[], None]) -> None:
    try:
        raise RuntimeError("Connection closed by peer")
    finally:
        wait()


@pytest.mark.parametrize(
    "function",
    [
        in_finally,
        in_a_handler_that_raises,
        in_an_inner_try,
        under_handlers_of_others,
        in_a_context_manager,
        through_known_managers,
        in_a_function_made_in_a_try,
    ],
)
def test_an_exception_that_nothing_catches_is_leaving(
    function: Callable[[Callable[[], None]], None],
) -> None:
    waiter = Waiter(function)
    assert isinstance(waiter.raised, KeyError)
    assert waiter.seen is waiter.raised


@pytest.mark.parametrize(
    "function",
    [
        in_a_loop_that_goes_on,
        in_a_handler_that_ends,
        in_a_finally_that_returns,
        under_a_finally_that_returns,
        raised_and_handled_in_a_finally,
        under_code_without_source,
        caught_by_name,
        caught_bare,
        swallowed_by_a_manager,
        suppressed,
        suppressed_by_a_stack,
        swallowed_by_a_manager_made_before,
        in_a_handler_that_raises_another,
        at_the_end_of_a_for,
        told_to_stop,
        without_source,
        nothing_raised,
        an_echo,
    ],
)
def test_one_that_may_be_caught_is_not(function: Callable[[Callable[[], None]], None]) -> None:
    assert Waiter(function).seen is None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="`except*` is new in Python 3.11")
def test_except_star_may_catch() -> None:
    names: dict[str, Callable[[Callable[[], None]], None]] = {"in_finally": in_finally}
    source = (
        "def f(wait):\n    try:\n        in_finally(wait)\n    except* KeyError:\n        pass\n"
    )
    import linecache

    linecache.cache["<star>"] = (len(source), None, source.splitlines(keepends=True), "<star>")
    exec(compile(source, "<star>", "exec"), names)
    assert Waiter(names["f"]).seen is None


def test_what_is_handled_outside_of_the_function_is_not_leaving() -> None:
    def outside(wait: Callable[[], None]) -> None:
        wait()

    found: list[BaseException | None] = []

    def run() -> None:
        try:
            raise KeyError("outside")
        except KeyError:
            ident = threading.get_ident()

            def look() -> None:
                watcher = threading.Thread(target=lambda: found.append(leaving(ident)))
                watcher.start()
                watcher.join()

            Interrupter().run(lambda: outside(look))

    run()
    assert found == [None]
