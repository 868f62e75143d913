"""The options of a job on many hosts, checked."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the processes that check a host import this module
    from outlast.launch.config.options import RunOptions

_PORTS = {"c10d": 29400, "etcd": 2379, "static": 29500}
"""The backends, and the port of an endpoint without one, as with torchrun."""
_TIMES = {"join_timeout": 600.0, "last_call_timeout": 30.0}
_CONF = {
    "c10d": frozenset({*_TIMES, "timeout", "endpoints", "record_dir"}),
    "static": frozenset({*_TIMES, "timeout", "record_dir"}),
    "etcd": frozenset(
        {*_TIMES, "timeout", "protocol", "cacert", "cert", "key", "user", "password_file"}
    ),
}
_UNITS_S = {"": 1, "s": 1, "min": 60, "h": 3600, "d": 86400}
_LIMIT = re.compile(r"(\d+)(?:/(\d+(?:\.\d+)?) ?(s|min|h|d|))?")
NO_RUN_ID = "none"
"""The run ID that torchrun uses if none is given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostsSpec:
    """The hosts of a job."""

    # the number of hosts with which the job may run
    minimum: int
    maximum: int
    backend: str  # `c10d`, `static` or `etcd`
    endpoints: tuple[tuple[str, int], ...]  # host and port of each
    # whether other hosts may be given other endpoints (`endpoints=differ`). They are then no guard
    # against two groups: for launchers that start one group only, and tell hosts that come later
    # which hosts there are.
    endpoints_differ: bool = False
    local_addr: str | None = None  # the address of this host for the others; `None` finds it
    place: int = -1  # the place that this host asks for; -1 for any
    # a file or a command that says where this host is in the network; empty if neither is given
    rank_order: str = ""
    lease_s: float = 5.0  # how long a host may be silent before the others go on without it
    join_s: float = 600.0  # how long to wait for the minimum
    last_call_s: float = 30.0  # how long to wait for more hosts once the minimum has joined
    # how long the ranks of a lost host wait for another host; `None` for seconds if the job may
    # continue without it, and minutes otherwise
    replacement_s: float | None = None
    # a host gets no more ranks after this many faults, 0 for no limit; all faults count, or those
    # of the last seconds
    max_faults: int = 0
    fault_window_s: float = math.inf
    # a file or a command that says when this host is to leave; `None` for none
    leave_when: str | None = None
    # further settings of the backend
    conf: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def job_mark(self, run_id: str) -> str:
        where = () if self.endpoints_differ else self.endpoints
        return hashlib.sha256(repr((run_id, where)).encode()).hexdigest()[:16]


def hosts_from_options(options: RunOptions) -> HostsSpec | None:
    """The hosts of the job; `None` for one host. A `ValueError` names the option."""
    minimum, maximum = _nnodes(options.nnodes or "1")
    if options.standalone:
        minimum, maximum = 1, 1
    if maximum == 1:
        if options.node_rank != 0:
            raise ValueError(f"--node-rank {options.node_rank}: with --nnodes 1 there is only 0")
        if options.max_host_faults is not None:
            raise ValueError("--max-host-faults: with --nnodes 1 no other host could go on")
        if options.health_interval is not None:
            raise ValueError("--health-interval: with --nnodes 1 no other host could go on")
        return None
    backend = _backend(options)
    conf = _conf(options.rdzv_conf, backend)
    times = {name: _seconds(name, conf.pop(name, default)) for name, default in _TIMES.items()}
    if "timeout" in conf:  # torchrun's name for static rendezvous
        times["join_timeout"] = _seconds("timeout", conf.pop("timeout"))
    for name in ("host_timeout", "replacement_timeout"):
        value = getattr(options, name)
        if value is not None and (not math.isfinite(value) or value <= 0):
            raise ValueError(f"--{name.replace('_', '-')} {value:g}: must be a positive number")
    if options.leave_when is not None and not options.leave_when.strip():
        raise ValueError("--leave-when: needs a command, or the path of a file")
    differ = conf.pop("endpoints", "")
    if differ not in ("", "differ"):
        raise ValueError(f"--rdzv-conf endpoints={differ}: must be endpoints=differ")
    static = backend == "static"
    if static and minimum != maximum:
        raise ValueError(
            f"--rdzv-backend static --nnodes {options.nnodes}: the number of hosts is fixed; "
            "c10d and etcd allow MIN:MAX"
        )
    if static and not 0 <= options.node_rank < maximum:
        raise ValueError(f"--node-rank {options.node_rank}: must be from 0 to {maximum - 1}")
    if static and options.rank_order is not None:
        raise ValueError("--rank-order: with --rdzv-backend static, --node-rank gives the places")
    if options.rank_order is not None and not options.rank_order.strip():
        raise ValueError("--rank-order: must not be empty")
    max_faults, window_s = fault_limit("--max-host-faults", options.max_host_faults, 1)
    return HostsSpec(
        minimum=minimum,
        maximum=maximum,
        backend=backend,
        endpoints=_endpoints(options, backend),
        endpoints_differ=bool(differ),
        local_addr=options.local_addr,
        place=options.node_rank if static else -1,
        rank_order=options.rank_order or "",
        lease_s=options.host_timeout,
        join_s=times["join_timeout"],
        last_call_s=0.0 if static else times["last_call_timeout"],
        replacement_s=options.replacement_timeout,
        max_faults=max_faults or 0,
        leave_when=options.leave_when,
        fault_window_s=window_s,
        conf=conf,
    )


def settings(options: RunOptions, hosts: HostsSpec) -> tuple[tuple[str, str], ...]:
    """What must be equal on all hosts, by the name that the user knows."""
    # Which endpoint founds the group depends on their order. Members of etcd may be in any order.
    differ = hosts.backend == "etcd" or hosts.endpoints_differ
    endpoints = "" if differ else ",".join(f"{h}:{p}" for h, p in hosts.endpoints)
    return (
        ("outlast version", importlib.metadata.version("outlast")),
        ("torch version", importlib.metadata.version("torch")),
        ("--nnodes", f"{hosts.minimum}:{hosts.maximum}"),
        ("--nproc-per-node", options.nproc_per_node),
        ("--rdzv-backend", hosts.backend),
        ("--rdzv-endpoint", endpoints),
        ("--host-timeout", f"{hosts.lease_s:g}"),
        ("--max-restarts", str(options.max_restarts)),
        ("--max-host-faults", str(options.max_host_faults)),
        ("--rank-order", "given" if hosts.rank_order else "not given"),
        ("--health-check full", "yes" if options.health_check == "full" else "no"),
        ("script", f"-m {options.script}" if options.module else Path(options.script).name),
        ("content of the script", _contents(options)),
        ("command line of the script", shlex.join(options.args or ())),
    )


def _nnodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not low.isdecimal() or not (high or low).isdecimal():
        raise ValueError(f"--nnodes {text}: must be a number of hosts, or MIN:MAX")
    minimum, maximum = int(low), int(high or low)
    if not 1 <= minimum <= maximum:
        raise ValueError(f"--nnodes {text}: MIN must be at least 1 and at most MAX")
    return minimum, maximum


def _backend(options: RunOptions) -> str:
    backend = options.rdzv_backend
    if backend == "etcd-v2":
        raise ValueError("--rdzv-backend etcd-v2: etcd's old API is not supported; use etcd")
    if backend not in _PORTS:
        raise ValueError(f"--rdzv-backend {backend}: must be c10d, etcd or static")
    # The default is torchrun's, `static`, which means --master-addr and --node-rank there.
    return "c10d" if backend == "static" and options.rdzv_endpoint else backend


def _endpoints(options: RunOptions, backend: str) -> tuple[tuple[str, int], ...]:
    text = options.rdzv_endpoint
    if not text:
        if backend != "static" or not options.master_addr:
            raise ValueError(
                f"--nnodes {options.nnodes} needs --rdzv-endpoint HOST:PORT[,HOST:PORT...], "
                "the same on all hosts"
            )
        return ((options.master_addr.strip("[]"), options.master_port or _PORTS[backend]),)
    endpoints = tuple(_endpoint(item.strip(), backend) for item in text.split(","))
    for host, port in endpoints:
        if endpoints.count((host, port)) > 1:
            raise ValueError(f"--rdzv-endpoint {text}: {host}:{port} is listed twice")
    return endpoints


def _endpoint(text: str, backend: str) -> tuple[str, int]:
    host, colon, digits = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, digits = text, str(_PORTS[backend])
    if not host or not digits.isdecimal() or not 0 < int(digits) < 1 << 16:
        raise ValueError(f"--rdzv-endpoint {text}: must be HOST:PORT[,HOST:PORT...]")
    return host.strip("[]"), int(digits)


def _conf(text: str, backend: str) -> dict[str, str]:
    conf: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--rdzv-conf {item}: must be NAME=VALUE[,NAME=VALUE...]")
        if name.strip() not in _CONF[backend]:
            known = ", ".join(sorted(_CONF[backend]))
            raise ValueError(f"--rdzv-conf {item}: unknown with {backend}, which knows {known}")
        conf[name.strip()] = value.strip()
    return conf


def _seconds(name: str, value: str | float) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ValueError(f"--rdzv-conf {name}={value}: must be a number of seconds")
    return seconds


def _contents(options: RunOptions) -> str:
    """A hash of the script; empty for a program, and for a module, whose file is not known here."""
    if options.no_python or options.module or not Path(options.script).is_file():
        return ""
    return hashlib.sha256(Path(options.script).read_bytes()).hexdigest()[:16]


def fault_limit(option: str, text: str | None, at_least: int) -> tuple[int | None, float]:
    """A limit of faults, `N` or `N/TIME`: the number, and the time in seconds; infinite if there is
    none. A `ValueError` names the option.
    """
    if text is None:
        return None, math.inf
    found = _LIMIT.fullmatch(text)
    if found is not None:
        number, time, unit = int(found[1]), found[2], found[3]
        window_s = math.inf if time is None else float(time) * _UNITS_S[unit]
        if number >= at_least and window_s > 0:
            return number, window_s
    raise ValueError(
        f"{option} {text}: must be a number of faults of at least {at_least}, or N/TIME with a "
        "time in seconds, or as 90s, 10min, 1h or 2d"
    )
