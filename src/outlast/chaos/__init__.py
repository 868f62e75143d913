"""Faults by plan: which rank fails how, and when; for tests, demonstrations and drills.

From the command line, `outlast run --chaos plan.json ...` (the format is in `plan.py`). From
Python::

    from outlast import chaos

    chaos.install([chaos.fail_at(rank=1, step=20), chaos.fail_at(rank=2, step=60, kind="sigkill")])

A training script may tell its own count of steps by `chaos.step(n)`, which does nothing where no
plan is installed. Each fault fires once in a job, whoever is restarted or replaced meanwhile.
`chaos.fire(kind)` does one fault at once, and `chaos.storage` has files that cannot be relied on.
"""

from outlast.chaos.actions import fire
from outlast.chaos.fired import FiredFaults, MarkerDirectory, MemoryFired
from outlast.chaos.injector import Injector
from outlast.chaos.install import install, installed, step, uninstall
from outlast.chaos.kinds import Kind
from outlast.chaos.plan import Moment, Plan, PlannedFault, RandomFaults, fail_at

__all__ = [
    "FiredFaults",
    "Injector",
    "Kind",
    "MarkerDirectory",
    "MemoryFired",
    "Moment",
    "Plan",
    "PlannedFault",
    "RandomFaults",
    "fail_at",
    "fire",
    "install",
    "installed",
    "step",
    "uninstall",
]
