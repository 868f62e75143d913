"""Runs a script under a fault plan, as `outlast run --chaos PLAN` does with its workers.

    OUTLAST_CHAOS=plan.json python -m outlast.chaos.bootstrap script.py args...
    OUTLAST_CHAOS=plan.json python -m outlast.chaos.bootstrap -m package.module args...

The script sees the usual `__main__`, `sys.argv` and `sys.path`, and its tracebacks start with its
own lines. `OUTLAST_CHAOS_STATE` names the directory in which the job records fired faults; by
default it is in the temporary directory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from outlast.chaos.fired_faults import Environment, MarkerDirectory, job_directory
from outlast.chaos.injector import Injector
from outlast.chaos.install import install
from outlast.chaos.plan import Plan
from outlast.errors import ChaosError
from outlast.system.main_program import ScriptUnreadable, run_main

_USAGE = "usage: python -m outlast.chaos.bootstrap (SCRIPT | -m MODULE) [ARGUMENT...]"


def main(arguments: Sequence[str]) -> None:
    """Installs the plan that the environment names, and runs the script or module."""
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
    try:
        run_main(target, rest, as_module=as_module)
    except ScriptUnreadable as error:
        _exit(str(error))


def _exit(reason: str) -> NoReturn:
    print(f"outlast.chaos: {reason}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
