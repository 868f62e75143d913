"""The process beside a launcher that exports the metrics of its run.

The launcher starts it with `outlast.system.background_process`, sends it one message (a JSON object
and the listening socket), and closes the channel when the job is over. It ends then, or when the
launcher is gone; a launcher that was killed closes the channel too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

from outlast.metrics.collect import Collector
from outlast.metrics.live_run import LiveRun
from outlast.system.background_process import settle

_POLL_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """What to export."""

    # of the run, and its name
    folder: str
    run: str
    host: str | None  # if given, only what the processes of this host have recorded
    opentelemetry: bool  # whether to export to the collector that the `OTEL_*` variables name

    def encode(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()


def export(
    order: Order, listening: socket.socket | None, over: threading.Event, *, live: bool | None
) -> None:
    """Exports the metrics of a run until `over` is set.

    Args:
        listening: where to serve them for Prometheus; closed at the end.
        live: whether the run goes on for sure; `None` if that is to be found out.
    """
    run = LiveRun(
        Path(order.folder),
        host=order.host,
        name=order.run,
        alive=None if live is None else lambda: not over.is_set(),
    )
    with ExitStack() as stack:
        collector = Collector(run)
        if order.opentelemetry:
            from outlast.metrics.otlp import OtlpExport

            stack.callback(OtlpExport(collector).close)
        if listening is not None:
            from outlast.metrics.prometheus import MetricsServer

            stack.callback(MetricsServer(listening, collector).close)
        failed = False
        while not over.wait(_POLL_S):
            try:
                collector.poll()
                failed = False
            except OSError as e:  # a file system that does not answer now; said once
                if not failed:
                    print(f"outlast: metrics: {order.folder}: {e}", file=sys.stderr, flush=True)
                failed = True
        # What the job has written at its very end; a temporary folder may be gone.
        with contextlib.suppress(OSError):
            collector.poll()


def main() -> None:
    """Exports until the launcher closes the channel, or is gone."""
    channel = settle(ends_with_parent=False)
    try:
        payload, descriptors = channel.receive()
    except EOFError:
        return
    order = Order(**json.loads(payload))
    listening = socket.socket(fileno=descriptors[0]) if descriptors else None
    over = threading.Event()

    def watch() -> None:
        try:
            channel.receive()
        except (EOFError, OSError):
            over.set()

    threading.Thread(target=watch, name="outlast-launcher", daemon=True).start()
    export(order, listening, over, live=True)


if __name__ == "__main__":
    main()
