"""The phases of the launcher, and what leads from one to another.

::

    WAITING ----- an attempt starts here ---------------------> RUNNING
    RUNNING ----- all workers, on all hosts, are restarted ---> RESTARTING
    RESTARTING -- all workers and their helpers have ended ---> WAITING
    RUNNING ----- a failure that ends the job, or a signal ---> ENDING
    WAITING, RESTARTING -- the same --------------------------> ENDING
    RUNNING, ENDING -- all workers have ended ----------------> ENDING_HELPERS
    ENDING_HELPERS -- all helpers have ended -----------------> FINISHED
    FINISHED ---- the other hosts restart all workers --------> WAITING
    FINISHED, WAITING -- the job is over on all hosts --------> FLUSHING
    FLUSHING ---- all output is written ----------------------> OVER

On one host, WAITING and FINISHED last no time: see `coordinator`.
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """See the module."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    RESTARTING = enum.auto()
    ENDING = enum.auto()
    ENDING_HELPERS = enum.auto()
    FINISHED = enum.auto()
    FLUSHING = enum.auto()
    OVER = enum.auto()
