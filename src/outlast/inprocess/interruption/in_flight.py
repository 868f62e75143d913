"""Finds an exception that is on its way out of the function, while the function still waits.

A `finally` or a context manager may wait for other ranks: `finally: dist.barrier()`. These wait for
this rank, in another collective, until a timeout ends all of them. So such a wait is ended at once,
and the exception is the fault. Only if nothing in the function can catch it: an exception that ends
an epoch on all ranks, and is caught above, is no fault, and its ranks do meet at that barrier.

Python says which exception a thread handles, but not what follows. That is read from the source of
each frame on the stack. What cannot be read may catch everything; then the timeouts decide, and the
exception is named (`error_kinds.overtaken`).
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import linecache
import logging
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from outlast.errors import RankShouldRestart
from outlast.inprocess.interruption.error_kinds import USER_REGION, is_consequence, is_interrupt
from outlast.inprocess.interruption.interrupter import Interrupter, waits
from outlast.system.frames import exception_of, frame_of

log = logging.getLogger("outlast.inprocess")

_CAUGHT = (RankShouldRestart, GeneratorExit, StopIteration, StopAsyncIteration)
_ORDERLY = (None, 0, 143)  # 143: see `elastic.stop_signals`
_SWALLOW = (
    contextlib.suppress,
    contextlib.ExitStack,
    contextlib.AsyncExitStack,
    type(contextlib.contextmanager(iter)(())),  # of a function that is not known
)
_LEAVE = (ast.Return, ast.Break, ast.Continue)


class LeavingWatch:
    """Calls `report`, once an iteration, if an exception leaves a thread that waits for others."""

    def __init__(self, interrupter: Interrupter, report: Callable[[BaseException], None]) -> None:
        self._ident, self._report = interrupter.ident, report
        self._position: tuple[int, int] | None = None
        self._reported = -1

    def look(self, iteration: int) -> None:
        """Call it often. Only the same wait twice in a row counts: a collective may complete."""
        before, self._position = self._position, None
        if exception_of(self._ident) is None or iteration == self._reported:
            return
        frame = frame_of(self._ident)
        if frame is None or not waits(frame):
            return
        self._position = id(frame), frame.f_lasti
        if self._position != before:
            return
        try:
            error = leaving(self._ident)
            if error is not None:
                self._reported = iteration
                self._report(error)
        except Exception:  # a source of another form, the text of the error; timeouts still hold
            log.exception("an exception on its way out of the function could not be followed")
            self._reported = iteration


def leaving(ident: int) -> BaseException | None:
    """The exception that the function of this thread is certain to raise; `None` if there is none,
    or if that is not certain. Not an interrupt, nor an echo of another rank's fault; none that is
    caught in C, as at the end of a `for`; and not the orderly end of a process.
    """
    error, frame = exception_of(ident), frame_of(ident)
    trace = None if error is None else error.__traceback__
    if error is None or trace is None or isinstance(error, _CAUGHT):
        return None
    if isinstance(error, SystemExit) and error.code in _ORDERLY:
        return None  # the others leave too, and meet it
    # The newest entry of the traceback is that of the frame which handles the exception now. It is
    # not found below if the exception is handled outside of the function.
    while frame is not None and frame is not trace.tb_frame and frame.f_code is not USER_REGION:
        frame = frame.f_back
    if frame is not trace.tb_frame or is_consequence(error) or is_interrupt(error):
        return None
    line = _passed_on_by(frame, trace.tb_lineno)
    while line and frame is not None and frame.f_code is not USER_REGION:
        if _may_catch(frame, line, error):
            return None
        frame = frame.f_back
        line = 0 if frame is None else frame.f_lineno
    return error if line else None


def _passed_on_by(frame: FrameType, raised_at: int) -> int:
    """The line of the innermost statement of the frame that has seen the exception, raised at that
    line, and passes it on after what the frame executes now; 0 if none does for certain.
    """
    found, line = 0, frame.f_lineno
    for block in _blocks(frame) or ():  # an outer one comes before an inner one
        inside = _within(raised_at, block.body)
        if isinstance(block, ast.With | ast.AsyncWith):
            after = [range(block.lineno, block.body[0].lineno)] if inside else []  # `__exit__`
        else:
            bodies = [h.body for h in block.handlers if inside and _raises(h)]
            if block.finalbody and block.lineno <= raised_at < block.finalbody[0].lineno:
                bodies.append(block.finalbody)
            after = [_lines(body) for body in bodies if not _leaves(body)]
        found = block.lineno if any(line in lines for lines in after) else found
    return found


def _may_catch(frame: FrameType, line: int, error: BaseException) -> bool:
    """Whether a block of the frame around that line may catch the error."""
    if frame.f_globals.get("__name__") == "contextlib":
        return False  # it raises again what a context manager does not handle
    blocks = _blocks(frame)
    for block in blocks or ():
        if not _within(line, block.body):
            continue
        if isinstance(block, ast.With | ast.AsyncWith):
            if not all(_lets_pass(item.context_expr, frame) for item in block.items):
                return True
        elif _leaves(block.finalbody) or any(
            _matches(handler, frame, error) and not _raises(handler) for handler in block.handlers
        ):
            return True
    return blocks is None


def _matches(handler: ast.ExceptHandler, frame: FrameType, error: BaseException) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    found = [kind and _lookup(kind, frame) for kind in kinds]
    return any(not isinstance(kind, type) or isinstance(error, kind) for kind in found)


def _lets_pass(manager: ast.expr, frame: FrameType) -> bool:
    """Whether a context manager catches nothing: those of torch, of Python and of this package."""
    found = _lookup(manager.func if isinstance(manager, ast.Call) else manager, frame)
    package = str(getattr(found, "__module__", None)).partition(".")[0]
    known = package in ("torch", "outlast") or package in sys.stdlib_module_names
    kind = found if isinstance(found, type) else type(found)
    return known and not issubclass(kind, _SWALLOW)


def _lookup(expression: ast.expr, frame: FrameType) -> Any:
    """What a dotted name stands for in the frame, or `None`. No code of the user runs for it."""
    first, *parts = ast.unparse(expression).split(".")
    found = {**vars(builtins), **frame.f_globals, **frame.f_locals}.get(first)
    for part in parts:
        found = inspect.getattr_static(found, part, None)
    return found


def _blocks(frame: FrameType) -> list[Any] | None:
    """The `try` and `with` statements in the frame's function; `None` without its source."""
    code = frame.f_code
    if code.co_filename == "<string>":
        return None  # since Python 3.13, its lines would be those of `python -c`, of whatever code
    blocks = _of_source("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    return blocks and [block for block in blocks if block.lineno >= code.co_firstlineno]


@functools.lru_cache(64)
def _of_source(source: str) -> list[Any] | None:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    kinds = (ast.Try, ast.With, ast.AsyncWith, getattr(ast, "TryStar", ast.Try))
    return [node for node in ast.walk(tree) if isinstance(node, kinds)] if source else None


def _raises(handler: ast.ExceptHandler) -> bool:
    """Whether it raises the same exception again: another one may be caught by other handlers."""
    last = handler.body[-1]
    again = isinstance(last, ast.Raise) and (
        last.exc is None or (isinstance(last.exc, ast.Name) and last.exc.id == handler.name)
    )
    return again and not _leaves(handler.body)


def _within(line: int, body: Sequence[ast.stmt]) -> bool:
    return bool(body) and line in _lines(body)


def _lines(body: Sequence[ast.stmt]) -> range:
    return range(body[0].lineno, (body[-1].end_lineno or 0) + 1)


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether the block may end otherwise than at its last statement."""
    return any(isinstance(node, _LEAVE) for each in body for node in ast.walk(each))
