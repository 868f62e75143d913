"""Fault injection by plan (rank, kind, time and phase of each fault), for tests and demonstrations.

From the command line, `outlast run --chaos plan.json ...` (the format is in `plan.py`). From
Python::

    from outlast import chaos

    chaos.install([chaos.fail_at(rank=1, step=20), chaos.fail_at(rank=2, step=60, kind="sigkill")])

A training script may report its own step numbers with `chaos.step(n)`, which does nothing without
an installed plan. Each fault fires once per job, across restarts and replacements.
`chaos.fire(kind)` injects one fault at once; `chaos.storage` damages files.
"""

from outlast.chaos.actions import fire
from outlast.chaos.install import install, installed, step, uninstall
from outlast.chaos.kinds import Kind, Phase
from outlast.chaos.plan import Plan, PlannedFault, RandomFaults, fail_at

__all__ = [
    "Kind",
    "Phase",
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
