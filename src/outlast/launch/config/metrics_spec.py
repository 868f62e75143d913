"""Which metrics a launcher exports, from the options of `outlast run`."""

from __future__ import annotations

import dataclasses
import importlib.util

from outlast.launch.config.options import RunOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsSpec:
    """The exports of a launcher.

    Attributes:
        port: where metrics are served for Prometheus, 0 for a free port; `None` if they are not.
        opentelemetry: whether metrics and traces are sent by OTLP.
    """

    host: str
    port: int | None
    opentelemetry: bool


def metrics_from_options(options: RunOptions) -> MetricsSpec | None:
    """The exports that the options ask for; `None` if there are none.

    Raises:
        ValueError: if a package that is needed is not installed; names the extra.
    """
    if options.metrics_port is not None:
        require_package("prometheus_client", "--metrics-port", "prometheus")
    if options.opentelemetry:
        require_package("opentelemetry.sdk", "--opentelemetry", "opentelemetry")
        require_package("opentelemetry.exporter.otlp", "--opentelemetry", "opentelemetry")
    if options.metrics_port is None and not options.opentelemetry:
        return None
    return MetricsSpec(
        host=options.metrics_host, port=options.metrics_port, opentelemetry=options.opentelemetry
    )


def require_package(package: str, option: str, extra: str) -> None:
    """Checks that an optional package is installed.

    Raises:
        ValueError: if it is not; says how to install it.
    """
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # its parent package
        found = None
    if found is None:
        raise ValueError(
            f"{option}: the package {package} is not installed; "
            f"install it with: pip install 'outlast[{extra}]'"
        )
