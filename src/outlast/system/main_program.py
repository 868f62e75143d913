"""Runs a script or module as `__main__` in a process that has already executed other code."""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType, TracebackType

_FROZEN_RUNPY = "<frozen runpy>"


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
    rest = trace
    for frame in _frames(trace):
        if frame.tb_frame.f_code.co_filename == __file__:
            rest = frame.tb_next
    while rest is not None and rest.tb_frame.f_code.co_filename in (runpy.__file__, _FROZEN_RUNPY):
        rest = rest.tb_next
    # If the module was not found, no frame is left: then all frames are shown.
    sys.__excepthook__(kind, error.with_traceback(rest or trace), rest or trace)


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    return frames
