"""The metrics for Prometheus: a server that answers scrapes of a run.

Values are taken when they are scraped, in the server's thread, and nobody else waits for them.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from outlast.metrics.collect import Collector
from outlast.metrics.instruments import INSTRUMENTS, Kind

if TYPE_CHECKING:
    from prometheus_client import Metric


class RunMetrics:
    """A collector of prometheus-client: the values of a run at the moment of the scrape."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterator[Metric]:
        """The metric families; called by prometheus-client for each scrape."""
        from prometheus_client import core

        values = self._collector.values()
        gauges = {Kind.COUNTER: core.CounterMetricFamily, Kind.GAUGE: core.GaugeMetricFamily}
        for instrument in INSTRUMENTS:
            about = instrument.name, instrument.help
            if instrument.kind is Kind.HISTOGRAM:
                family = core.HistogramMetricFamily(*about, labels=instrument.labels)
                for labels, histogram in values.histograms[instrument].items():
                    family.add_metric(list(labels), histogram.cumulative(), histogram.total)
                yield family
                continue
            numbers = gauges[instrument.kind](*about, labels=instrument.labels)
            for labels, number in values.numbers.get(instrument, {}).items():
                numbers.add_metric(list(labels), number)
            yield numbers


class MetricsServer:
    """Serves the metrics of a run over HTTP, in threads of this process.

    Args:
        listening: a bound socket that listens; the server owns it from now on.
        collector: of the run.
    """

    def __init__(self, listening: socket.socket, collector: Collector) -> None:
        from prometheus_client import CollectorRegistry, MetricsHandler

        registry = CollectorRegistry(auto_describe=False)
        registry.register(RunMetrics(collector))
        self.address = listening.getsockname()[:2]
        self._server = _Server(self.address, MetricsHandler.factory(registry), False)
        self._server.socket.close()
        self._server.socket = listening
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="outlast-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the server. A scrape that is being answered is not waited for."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One line, and not a traceback on the job's console for each scrape that fails."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError):  # who asked has gone: its own affair
            print(f"outlast: metrics: a scrape failed: {error!r}", file=sys.stderr, flush=True)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at the address; with port 0 at a free one.

    Raises:
        OSError: if the address is not one of this host, or is in use.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family)


def url(listening: socket.socket) -> str:
    """Where Prometheus finds the metrics."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/metrics"
