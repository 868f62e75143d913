"""Runs a script under a fault plan, as `outlast run --chaos PLAN` does with its workers.

    OUTLAST_CHAOS=plan.json python -m outlast.chaos.bootstrap script.py args...
    OUTLAST_CHAOS=plan.json python -m outlast.chaos.bootstrap -m package.module args...

The script sees the usual `__main__`, `sys.argv` and `sys.path`, and its tracebacks start with its
own lines. `OUTLAST_CHAOS_STATE` names the directory in which the job records fired faults; by
default it is in the temporary directory.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import NoReturn

from outlast.chaos.environment import Environment
from outlast.chaos.fired_faults import MarkerDirectory, job_directory
from outlast.chaos.injector import Injector
from outlast.chaos.install import install
from outlast.chaos.plan import Plan
from outlast.errors import ChaosError

_USAGE = "usage: python -m outlast.chaos.bootstrap (SCRIPT | -m MODULE) [ARGUMENT...]"


def main(arguments: Sequence[str]) -> None:
    """Installs the plan that the environment names, and runs the script or module.

    Raises:
        SystemExit: with 2, if there is no script or no valid plan.
    """
    as_module = arguments[:1] == ["-m"]
    target, *rest = arguments[int(as_module) :] or [""]
    if not target or (target.startswith("-") and not as_module):
        _exit(_USAGE)
    environment = Environment.read()
    if environment.plan is None:
        _exit("OUTLAST_CHAOS is not set: there is no plan")
    try:
        plan = Plan.load(environment.plan)
        injector = Injector(plan, fired=MarkerDirectory(job_directory(environment)))
    except ChaosError as error:
        _exit(str(error))
    install(injector)
    sys.argv = [target, *rest]
    sys.excepthook = _print_without_own_frames
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
        _exit(f"can't open file {path!r}: {error.strerror}")
    # `-m` has put the working directory first; for a script it is the script's folder.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def _print_without_own_frames(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    own = (__file__, runpy.__file__, "<frozen runpy>")
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in own:
        rest = rest.tb_next
    # If the module was not found, no frame is left: then all frames are shown.
    sys.__excepthook__(kind, error.with_traceback(rest or trace), rest or trace)


def _exit(reason: str) -> NoReturn:
    print(f"outlast.chaos: {reason}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
