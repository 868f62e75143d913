"""`outlast run --metrics-port --opentelemetry`, and `outlast top`, beside a real job."""

from __future__ import annotations

import gzip
import http.server
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from launch.runs import Run, ends
from outlast.launch.cli import app
from procs import NET_S

TRAINS = """
import os, signal, sys, time
from outlast.inprocess import CallWrapper, Wrapper

@Wrapper()
def train(call: CallWrapper = None):
    call.ping()
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    while not os.path.exists(sys.argv[1]):
        call.ping()
        time.sleep(0.01)

train()
"""

WAITS = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


class Receiver:
    """What a collector of OpenTelemetry receives by OTLP over HTTP."""

    def __init__(self) -> None:
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.traces: list[ExportTraceServiceRequest] = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path == "/v1/metrics":
                    receiver.metrics.append(ExportMetricsServiceRequest.FromString(body))
                else:
                    receiver.traces.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def points(self) -> dict[str, Any]:
        """The last data of each metric."""
        return {
            metric.name: metric
            for request in self.metrics
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def spans(self) -> list[Any]:
        return [
            span
            for request in self.traces
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def scrape(run: Run) -> dict[str, float]:
    """The value of each series, by name and labels."""
    run.until_said("metrics: ")
    url = run.err.partition("metrics: ")[2].split()[0]
    with urllib.request.urlopen(url, timeout=NET_S) as answer:
        text = answer.read().decode()
    return {
        ",".join(
            (sample.name, *(value for _, value in sorted(sample.labels.items())))
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped_until(run: Run, series: str, value: float) -> dict[str, float]:
    """The first scrape in which `series` has the value."""
    deadline = time.monotonic() + NET_S
    while (found := scrape(run)).get(series) != value:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def exporter(run: Run) -> int:
    """The process ID of the exporter, which the launcher started."""
    for process in run.alive():
        if "outlast.metrics.main" in process.cmdline():
            return process.pid
    raise AssertionError(f"no exporter: {run.alive()}")


@pytest.mark.slow
def test_a_job_with_a_sigkill_is_seen_while_it_runs(tmp_path: Path, receiver: Receiver) -> None:
    finish, events = tmp_path / "finish", tmp_path / "events"
    options = ["--nproc-per-node=2", "--max-restarts=0", "--metrics-port=0", "--opentelemetry"]
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "COLUMNS": "200"}
    job = Run(tmp_path, TRAINS, *options, f"--events-dir={events}", args=[str(finish)], env=env)
    with job as run:
        found = scraped_until(run, "outlast_restarts_total,terminated", 1)
        host = socket.gethostname()
        assert found[f"outlast_members,{host},active"] == 1
        assert found[f"outlast_members_lost_total,{host}"] == 1
        assert found["outlast_recovery_seconds_count,total"] == 1
        assert found[f"outlast_time_seconds_total,{host},productive"] > 0

        frame = CliRunner().invoke(app, ["top", str(events), "--once"], env={"COLUMNS": "200"})
        assert frame.exit_code == 0, frame.output
        title, members = frame.output.splitlines()[:2]
        assert "running" in title
        assert "1 restart" in title
        assert "1 active" in members
        assert "1 lost so far" in members
        assert "Rank 1 (pid" in frame.output
        assert "was killed by SIGKILL" in frame.output

        finish.touch()
        assert run.wait() == 0
    # The exporter has sent what was left before it ended.
    points = receiver.points()
    [restarts] = points["outlast.restarts"].sum.data_points
    assert (restarts.as_double, restarts.attributes[0].value.string_value) == (1, "terminated")
    phases = {
        point.attributes[0].value.string_value: point.count
        for point in points["outlast.recovery"].histogram.data_points
    }
    assert phases["total"] == 1
    spans = receiver.spans()
    [root] = [span for span in spans if span.name == "outlast.restart"]
    ranks = [span for span in spans if span.name == "outlast.restart.rank"]
    assert [span.parent_span_id for span in ranks] == [root.span_id]  # the survivor
    assert {span.trace_id for span in spans} == {root.trace_id}
    assert {"outlast.detect", "outlast.abort", "outlast.term"} <= {span.name for span in spans}
    for span in spans:
        assert root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano

    frame = CliRunner().invoke(app, ["top", str(events)], env={"COLUMNS": "200"})
    assert "finished" in frame.output.splitlines()[0]


@pytest.mark.slow
def test_the_exporter_is_replaced_when_it_is_killed_and_no_folder_is_left(tmp_path: Path) -> None:
    finish = tmp_path / "finish"
    with Run(tmp_path, WAITS, "--metrics-port=0", args=[str(finish)]) as run:
        scrape(run)
        pid = exporter(run)
        os.kill(pid, signal.SIGKILL)
        assert ends(pid)
        assert scrape(run)["outlast_checkpoints_total,committed"] == 0  # by the next process
        assert exporter(run) != pid
        os.kill(exporter(run), signal.SIGSTOP)  # the job does not wait for it
        finish.touch()
        assert run.wait() == 0
    assert list(run.temporary.iterdir()) == []


def test_a_port_in_use_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with Run(tmp_path, WAITS, f"--metrics-port={port}", args=["never"]) as run:
            assert run.wait() == 1
    assert f"--metrics-port {port}: cannot serve metrics at 127.0.0.1: " in run.err
    assert "Address already in use" in run.err


@pytest.mark.slow
def test_the_exporter_ends_with_a_killed_launcher(tmp_path: Path) -> None:
    with Run(tmp_path, WAITS, "--metrics-port=0", args=["never"]) as run:
        scrape(run)
        pid = exporter(run)
        run.process.kill()
        assert ends(pid)
