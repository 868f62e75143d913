"""The program of a process: run as `__main__` where other code was executed before, and ended fast.

At its end, Python searches all objects for garbage, several times. Each search visits the 200,000
to 300,000 objects that torch and a script's other packages have created: 0.5 to 1 s of CPU time for
each process of a job, all at the same moment. It finds nothing but objects in reference cycles, and
their memory is about to be released anyway.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import runpy
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import TypeVar

V = TypeVar("V")

_FROZEN_RUNPY = "<frozen runpy>"
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class ScriptUnreadable(Exception):
    """The script cannot be read."""


def run_main(target: str, arguments: Sequence[str], *, as_module: bool) -> None:
    """Runs a program as `python TARGET ARGUMENTS...` or `python -m TARGET ARGUMENTS...` does.
    `sys.path[0]` must be the folder of the program that runs now, or the working directory; a
    script gets its own folder there. Tracebacks begin with the program's own lines.
    """
    sys.argv = [target, *arguments]
    sys.excepthook = _print_from_program
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        _run_script(target)


def _run_script(script: str) -> None:
    """Runs a script as `python SCRIPT` does. `runpy.run_path` would make `__file__` and
    `argv[0]` equal, and restore the old `__main__` while threads and exit handlers still run.
    """
    path = os.path.abspath(script)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise ScriptUnreadable(f"can't open file {path!r}: {error.strerror}") from error
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def _print_from_program(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Prints an error without the frames up to this file's last, and those of `runpy`."""
    rest = frame = trace
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == __file__:
            rest = frame.tb_next
        frame = frame.tb_next
    while rest is not None and rest.tb_frame.f_code.co_filename in (runpy.__file__, _FROZEN_RUNPY):
        rest = rest.tb_next
    # If the module was not found, no frame is left: then all frames are shown.
    sys.__excepthook__(kind, error.with_traceback(rest or trace), rest or trace)


def freeze_imports() -> None:
    """Takes what a script has imported out of all later garbage collections, in which a restart
    would wait for a pass over a million objects. What the script has made before is freed as ever,
    except for reference cycles. Not in a notebook, which makes more before.
    """
    is_script = hasattr(sys.modules["__main__"], "__file__") and not hasattr(sys, "ps1")
    if is_script and gc.get_freeze_count() == 0:
        gc.freeze()


def without_collections(make: Callable[[], V]) -> V:
    """What `make` returns, made with the garbage collector off, which would look at all objects
    again and again. In the main thread only: another one might undo what the program has set since.
    """
    is_on = gc.isenabled() and threading.current_thread() is threading.main_thread()
    try:
        if is_on:
            gc.disable()
        return make()
    finally:  # no call before this one: an interrupt may be raised only after a call
        if is_on:
            gc.enable()


def exit_fast() -> None:
    """Let this process end without these searches. Exit handlers run, and objects outside of cycles
    are released, as always; a file in a cycle, which the search would close, is flushed.
    """
    atexit.unregister(_hide_from_the_search)
    atexit.register(_hide_from_the_search)


def _hide_from_the_search() -> None:
    gc.unfreeze()  # what was frozen before is not among the objects below
    for each in gc.get_objects():
        # By its type: `isinstance` asks proxies, whose object may be gone, for their class.
        if type(each).__module__ == "nanobind":
            return  # a library made with it, as triton is, prints what the search has not freed
        if issubclass(type(each), _BUFFERED) and not each.closed:
            with contextlib.suppress(OSError, ValueError):  # its disk is full, its reader is gone
                each.flush()
    gc.freeze()
