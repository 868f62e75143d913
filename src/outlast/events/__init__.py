"""What happened in a job: typed events, where they go, and the report of a run (`load_run`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.system.lazy_exports import exports

if TYPE_CHECKING:
    from outlast.events import report as report
    from outlast.events import types as types
    from outlast.events.emitter import JsonlSink as JsonlSink
    from outlast.events.emitter import MemorySink as MemorySink
    from outlast.events.emitter import Sink as Sink
    from outlast.events.event import Event as Event
    from outlast.events.report import load_run as load_run

_MODULES = {
    "emitter": "JsonlSink MemorySink Sink",
    "event": "Event",
    "report": "load_run report",
    "types": "types",
}

__getattr__, __dir__ = exports(__name__, _MODULES)
