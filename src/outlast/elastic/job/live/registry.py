"""The points of this process, which outlive the iteration of a restart in place that made them.

A point is kept for each folder of checkpoints, until all ranks have restored a state or the call of
the wrapped function ends.
"""

from __future__ import annotations

from outlast.elastic.job.live.recorder import Recorder
from outlast.inprocess.running_call import RunningCall

_recorders: dict[str, Recorder] = {}
_missing: dict[str, str] = {}  # why there is no recorder, by folder
_owner: RunningCall | None = None


def present(url: str, call: RunningCall) -> Recorder | None:
    """The recorder of the iteration before, if there is one."""
    _belong_to(call)
    return _recorders.get(url)


def why_missing(url: str) -> str:
    """Why the iteration before has kept no state; empty if it is unknown."""
    return _missing.get(url, "")


def replace(url: str, call: RunningCall, recorder: Recorder | None, missing: str = "") -> None:
    """Keeps this recorder instead of the one before, which releases its state. `missing`: why there
    is none.
    """
    _belong_to(call)
    _missing[url] = missing
    before = _recorders.pop(url, None)
    if recorder is not None:
        _recorders[url] = recorder
    if before is not None:
        before.release()


def _belong_to(call: RunningCall) -> None:
    global _owner
    if _owner is not call:
        _release_all()
        _owner = call
        call.at_end(_release_all)


def _release_all() -> None:
    global _owner
    for recorder in _recorders.values():
        recorder.release()
    _recorders.clear()
    _missing.clear()
    _owner = None
