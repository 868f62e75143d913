"""The metrics for OpenTelemetry, and one trace for each restart, sent by OTLP over HTTP.

The SDK is configured by its standard variables: `OTEL_EXPORTER_OTLP_ENDPOINT`,
`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_METRIC_EXPORT_INTERVAL`, `OTEL_SERVICE_NAME`,
`OTEL_RESOURCE_ATTRIBUTES` and so on. No global provider is set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, Tracer, set_span_in_context

from outlast.events import Event
from outlast.events.report import Restart
from outlast.metrics.collect import Collector, Labels, Listener, cause_label
from outlast.metrics.instruments import BOUNDS, INSTRUMENTS, Instrument, Kind
from outlast.metrics.live_run import LiveRun
from outlast.metrics.recovery_trace import RankRecovery, RecoveryTracker

_SCOPE = "outlast"


class OtlpExport(Listener):
    """Exports the metrics of a run at the SDK's interval, and the trace of each restart.

    Attributes:
        collector: of the run; the owner polls it, which sends the traces.
    """

    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._tracker = RecoveryTracker()
        self.collector = Collector(run, listener=self)
        resource = _resource(run)
        self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer: Tracer = self._tracers.get_tracer(_SCOPE)
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
        meter = self._meters.get_meter(_SCOPE)
        self._histograms = {}
        for instrument in INSTRUMENTS:
            name, unit, about = instrument.opentelemetry_name, instrument.unit, instrument.help
            if instrument.kind is Kind.HISTOGRAM:
                self._histograms[instrument] = meter.create_histogram(name, unit, about)
            elif instrument.kind is Kind.COUNTER:
                meter.create_observable_counter(name, [self._reader(instrument)], unit, about)
            else:
                meter.create_observable_gauge(name, [self._reader(instrument)], unit, about)

    def close(self) -> None:
        """Exports what is new, and ends the threads of the SDK. Waits while the collector of
        OpenTelemetry does not answer, for as long as the exporters try.
        """
        self._tracers.shutdown()
        self._meters.shutdown()

    # ---------------------------------------------------------------- called by the collector

    def event(self, event: Event) -> None:
        self._tracker.apply(event)

    def observed(self, instrument: Instrument, labels: Labels, seconds: float) -> None:
        attributes = dict(zip(instrument.labels, labels, strict=True))
        self._histograms[instrument].record(seconds, attributes)

    def restarted(self, restart: Restart) -> None:
        """Sends the trace of a restart. Only ranks of this host are in it: the clocks of other
        hosts are not known.
        """
        recoveries = [
            each
            for each in self._tracker.take(restart.iteration)
            if each.host == self._run.own_host
        ]
        cause = restart.cause
        began = [each.start for each in recoveries]
        fault = None
        if cause is not None and cause.host == self._run.own_host:
            fault = self._run.origin(cause.host) + cause.at
            began.append(fault)
        if not began:
            return
        clock = time.time_ns() - int(time.monotonic() * 1e9)
        start = min(began)
        end = max([each.end for each in recoveries] or [start + (restart.phases.total or 0.0)])
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
        root = self._tracer.start_span(
            "outlast.restart", start_time=_ns(start, clock), attributes=attributes
        )
        for recovery in recoveries:
            self._rank_span(root, recovery, fault, clock)
        root.end(_ns(end, clock))

    def _rank_span(
        self, root: Span, recovery: RankRecovery, fault: float | None, clock: int
    ) -> None:
        context = set_span_in_context(root)
        start = recovery.start if fault is None else min(fault, recovery.start)
        span = self._tracer.start_span(
            "outlast.restart.rank",
            context,
            start_time=_ns(start, clock),
            attributes={
                "outlast.rank": recovery.rank,
                "host.name": recovery.host,
                "process.pid": recovery.pid,
            },
        )
        phases = [(phase.name, phase.start, phase.end) for phase in recovery.phases]
        if start < recovery.start:
            phases.insert(0, ("detect", start, recovery.start))
        for name, begin, end in phases:
            child = self._tracer.start_span(
                f"outlast.{name}", set_span_in_context(span), start_time=_ns(begin, clock)
            )
            child.end(_ns(end, clock))
        span.end(_ns(recovery.end, clock))

    def _reader(self, instrument: Instrument) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(_: CallbackOptions) -> Iterable[Observation]:
            for labels, value in (
                self.collector.values(poll=False).numbers.get(instrument, {}).items()
            ):
                yield Observation(value, dict(zip(instrument.labels, labels, strict=True)))

        return read


def _resource(run: LiveRun) -> Resource:
    """What the environment says of this service; its name is `outlast` by default."""
    resource = Resource.create({"outlast.run": run.name, "host.name": run.own_host})
    name = str(resource.attributes.get(SERVICE_NAME, ""))
    if not name or name.startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "outlast"}))
    return resource


def _ns(seconds: float, clock: int) -> int:
    return int(seconds * 1e9) + clock
