"""The metrics for Prometheus: a server that answers scrapes of a run.

Values are taken when they are scraped, in the server's thread, and nothing else waits for them.
`prometheus_client` is an extra: it is imported when a server is made.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from outlast.events.report import PHASE_FIELDS
from outlast.metrics.collect import Collector, Labels, Listener
from outlast.metrics.instruments import BOUNDS, INSTRUMENTS, RECOVERY, Instrument, Kind
from outlast.system.parallel import start_thread

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric


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
