"""Exports the metrics of a run: the process beside a launcher, and the server for Prometheus.

The launcher starts the process with `outlast.system.background_process`, sends it one message (a
JSON object and the listening socket), and closes the channel when the job is over. It ends then, or
when the launcher is gone; a launcher that was killed closes the channel too.

The server takes values when they are scraped, in its thread, and nothing else waits for them.
`prometheus_client` is an extra: it is imported when a server is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from outlast.events.report import PHASE_FIELDS
from outlast.metrics.collect import (
    BOUNDS,
    INSTRUMENTS,
    RECOVERY,
    Collector,
    Instrument,
    Kind,
    Labels,
    Listener,
)
from outlast.metrics.live_run import LiveRun
from outlast.system.background_process import settle
from outlast.system.parallel import start_thread

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

_POLL_S = 1.0


class _Metrics(Listener):
    """A collector of `prometheus_client`: counters and gauges at the moment of the scrape."""

    def __init__(self, collector: Collector, registry: CollectorRegistry) -> None:
        from prometheus_client import Histogram, disable_created_metrics

        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._collector = collector
        collector.listeners.append(self)
        registry.register(self)  # first: a scrape polls, which may add observations
        self._histograms = {
            each: Histogram(each.name, each.help, each.labels, buckets=BOUNDS, registry=registry)
            for each in INSTRUMENTS
            if each.kind is Kind.HISTOGRAM
        }
        for phase in PHASE_FIELDS:
            self._histograms[RECOVERY].labels(phase)

    def observed(self, instrument: Instrument, labels: Labels, seconds: float) -> None:
        histogram = self._histograms[instrument]
        (histogram.labels(*labels) if labels else histogram).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """The metric families; called by `prometheus_client` for each scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily}
        values = self._collector.values()
        for each in INSTRUMENTS:
            if each.kind in families:
                family = families[each.kind](each.name, each.help, labels=each.labels)
                for labels, number in values.get(each, {}).items():
                    family.add_metric(list(labels), number)
                yield family


class MetricsServer(ThreadingHTTPServer):
    """Serves the metrics of a run over HTTP, in threads of this process; owns `listening`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, collector: Collector) -> None:
        from prometheus_client import CollectorRegistry, MetricsHandler

        registry = CollectorRegistry(auto_describe=False)
        _Metrics(collector, registry)
        address = listening.getsockname()[:2]
        super().__init__(address, MetricsHandler.factory(registry), bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self._thread = start_thread("outlast-metrics", self.serve_forever)

    def close(self) -> None:
        """Ends the server. A scrape that is being answered is not waited for."""
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One line, and not a traceback on the job's console for each scrape that fails."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError):  # the client has gone
            print(f"outlast: metrics: a scrape failed: {error!r}", file=sys.stderr, flush=True)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at the address; with port 0 at a free one."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family)


def url(listening: socket.socket) -> str:
    """Where Prometheus finds the metrics."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """What to export."""

    # of the run, and its name
    folder: str
    run: str
    host: str | None  # if given, only what the processes of this host have recorded
    opentelemetry: bool  # whether to export to the collector that the `OTEL_*` variables name


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
    order = msgspec.json.decode(payload, type=Order)
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
