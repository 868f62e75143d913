"""The text that Prometheus scrapes, read by its own parser."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from metrics.replay import Logs, eventful_run
from outlast.metrics.collect import INSTRUMENTS, Collector
from outlast.metrics.live_run import LiveRun
from outlast.metrics.main import MetricsServer, listen, url


@pytest.fixture
def scraped(tmp_path: Path) -> dict[str, dict[str, float]]:
    logs = Logs(tmp_path / "run")
    logs.write(eventful_run())
    listening = listen("127.0.0.1", 0)
    server = MetricsServer(listening, Collector(LiveRun(logs.folder, alive=lambda: False)))
    try:
        with urllib.request.urlopen(url(listening), timeout=60) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def test_the_series_of_a_run(scraped: dict[str, dict[str, float]]) -> None:
    assert scraped["outlast_restarts_total"] == {"cause=exception": 1, "cause=terminated": 1}
    assert scraped["outlast_steps_redone_total"] == {"": 30}
    assert scraped["outlast_run_info"] == {"run=run": 1}
    assert scraped["outlast_recovery_seconds_count"]["phase=total"] == 2
    assert scraped["outlast_recovery_seconds_bucket"]["le=+Inf,phase=total"] == 2
    assert scraped["outlast_checkpoint_blocked_seconds_sum"] == {"": 0.75}
    assert scraped["outlast_members_lost_total"] == {"host=a": 1}
    assert not any(name.endswith("_created") for name in scraped)
    assert sum(scraped["outlast_time_seconds_total"].values()) == pytest.approx(41.0)


def test_every_instrument_is_described(scraped: dict[str, dict[str, float]]) -> None:
    names = set(scraped)
    for instrument in INSTRUMENTS:
        name = instrument.prometheus_name
        assert {name, f"{name}_count"} & names, name


def test_an_address_of_ipv6() -> None:
    try:
        listening = listen("::1", 0)
    except OSError:
        pytest.skip("this host has no IPv6")
    with listening:
        assert url(listening).startswith("http://[::1]:")
