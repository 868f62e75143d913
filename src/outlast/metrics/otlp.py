"""The metrics for OpenTelemetry, and one trace for each restart, sent by OTLP over HTTP.

The SDK is configured by its standard variables: `OTEL_EXPORTER_OTLP_ENDPOINT`,
`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_METRIC_EXPORT_INTERVAL`, `OTEL_SERVICE_NAME`,
`OTEL_RESOURCE_ATTRIBUTES` and so on. No global provider is set.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, Tracer, use_span

from outlast.events.report import RankRecovery, Restart
from outlast.events.report import Span as Phase
from outlast.metrics.collect import (
    BOUNDS,
    INSTRUMENTS,
    Collector,
    Instrument,
    Kind,
    Labels,
    Listener,
    cause_label,
)
from outlast.metrics.live_run import LiveRun


class OtlpExport(Listener):
    """Exports the metrics of a run at the SDK's interval, and the trace of each restart, which is
    sent when the owner of the collector polls it.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector, self._run = collector, collector.run
        collector.listeners.append(self)
        self._clock = 0.0  # what is added to times of the report, for those of the world
        resource = _resource(self._run)
        self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer: Tracer = self._tracers.get_tracer("outlast")
        self._meters = MeterProvider(
            metric_readers=[PeriodicExportingMetricReader(OTLPMetricExporter())],
            resource=resource,
            shutdown_on_exit=False,
            views=[
                View(
                    instrument_name=each.opentelemetry_name,
                    aggregation=ExplicitBucketHistogramAggregation(BOUNDS),
                )
                for each in INSTRUMENTS
                if each.kind is Kind.HISTOGRAM
            ],
        )
        meter = self._meters.get_meter("outlast")
        self._histograms = {}
        for each in INSTRUMENTS:
            name, unit, description = each.opentelemetry_name, each.unit, each.help
            if each.kind is Kind.HISTOGRAM:
                self._histograms[each] = meter.create_histogram(name, unit, description)
            elif each.kind is Kind.COUNTER:
                meter.create_observable_counter(name, [self._reader(each)], unit, description)
            else:
                meter.create_observable_gauge(name, [self._reader(each)], unit, description)

    def close(self) -> None:
        """Exports what is new, and ends the threads of the SDK. Waits while the collector of
        OpenTelemetry does not answer, for as long as the exporters try.
        """
        self._tracers.shutdown()
        self._meters.shutdown()

    def observed(self, instrument: Instrument, labels: Labels, seconds: float) -> None:
        attributes = dict(zip(instrument.labels, labels, strict=True))
        self._histograms[instrument].record(seconds, attributes)

    def restarted(self, restart: Restart) -> None:
        """Sends the trace of a restart. Only ranks of this host are in it: the clocks of other
        hosts are not known.
        """
        host, cause = self._run.own_host, restart.cause
        ranks = [each for each in restart.ranks if each.host == host]
        began = [each.start for each in ranks]
        if cause is not None and cause.host == host:
            began.append(cause.at)
        if not began:
            return
        start, ends = min(began), [each.end for each in ranks if each.end is not None]
        end = max(ends, default=start + (restart.phases.total or 0.0))
        attributes: dict[str, str | int] = {
            "outlast.run": self._run.name,
            "outlast.cause": cause_label(restart),
            "outlast.iteration": restart.iteration,
            "outlast.world_size.before": restart.world_size_before,
            "outlast.world_size.after": restart.world_size_after,
        }
        if cause is not None:
            attributes |= {
                "outlast.rank": cause.rank,
                "host.name": cause.host,
                "outlast.message": cause.message,
            }
        self._clock = time.time() - time.monotonic() + self._run.origin(host)
        with self._span("", start, end) as root:
            root.set_attributes(attributes)
            for each in ranks:
                self._rank(each, start)

    def _rank(self, rank: RankRecovery, start: float) -> None:
        with self._span(".rank", start, rank.start if rank.end is None else rank.end) as span:
            span.set_attributes(
                {"outlast.rank": rank.rank, "host.name": rank.host, "process.pid": rank.pid}
            )
            phases = list(rank.phases)
            if start < rank.start:
                phases.insert(0, Phase(state="detect", start=start, end=rank.start))
            for phase in phases:
                with self._span(f".{phase.state}", phase.start, phase.end, "outlast"):
                    pass

    @contextlib.contextmanager
    def _span(
        self, name: str, start: float, end: float, prefix: str = "outlast.restart"
    ) -> Iterator[Span]:
        """A span inside the one around it; times are those of the report of this host."""
        began, ended = (int((moment + self._clock) * 1e9) for moment in (start, end))
        span = self._tracer.start_span(prefix + name, start_time=began)
        with use_span(span):
            yield span
        span.end(ended)

    def _reader(self, instrument: Instrument) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(_: CallbackOptions) -> Iterable[Observation]:
            values = self._collector.values(poll=False)
            for labels, value in values.get(instrument, {}).items():
                yield Observation(value, dict(zip(instrument.labels, labels, strict=True)))

        return read


def _resource(run: LiveRun) -> Resource:
    """What the environment says of this service; its name is `outlast` by default."""
    resource = Resource.create({"outlast.run": run.name, "host.name": run.own_host})
    name = str(resource.attributes.get(SERVICE_NAME, ""))
    if not name or name.startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "outlast"}))
    return resource
