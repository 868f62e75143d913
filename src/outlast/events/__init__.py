"""What happened in a job: typed events, where they go, and the report of a run (`load_run`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.system.lazy_exports import exports

if TYPE_CHECKING:
    from outlast.events import report, types
    from outlast.events.emitter import JsonlSink, MemorySink, Sink
    from outlast.events.event import Event
    from outlast.events.report import load_run

__all__ = ["Event", "JsonlSink", "MemorySink", "Sink", "load_run", "report", "types"]

_MODULES = {
    "emitter": "JsonlSink MemorySink Sink",
    "event": "Event",
    "report": "load_run report",
    "types": "types",
}

__getattr__, __dir__ = exports(__name__, _MODULES)
