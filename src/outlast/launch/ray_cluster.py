"""Runs a job on the nodes of a Ray cluster, one launcher on each, and replaces the nodes it loses.

A placement group reserves one bundle of resources for each host, on different nodes. In each
bundle an actor runs `outlast run` as a subprocess. If a node dies, Ray finds another one for its
bundle (or has its autoscaler start one); a new actor there starts a launcher that joins the running
job. So Ray provides the hosts, and the launchers do the rest, as they do elsewhere.

Ray is an extra (`pip install outlast[ray]`) and is imported only by a call.
"""

from __future__ import annotations

import dataclasses
import secrets
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from outlast.errors import LaunchError
from outlast.launch.commands.shared import UNFIT
from outlast.launch.environment import launcher_environment
from outlast.launch.workers import exec_shim
from outlast.system.error_text import first_line
from outlast.system.sockets import listen

_ENDPOINTS = 3
# What a launcher that has ended for the whole job leaves to the others to end as well.
_LAST_S = 120.0


class HostProcess:
    """The launcher of one host; an actor in the cluster."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def endpoint(self) -> tuple[str, str]:
        """The address of this node, and the endpoint at a port that is free there."""
        import ray.util

        address = ray.util.get_node_ip_address()
        with listen(address) as probe:
            port = probe.getsockname()[1]
        return address, f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    def run(self, options: Sequence[str], environment: Mapping[str, str]) -> int:
        """Runs `outlast run` with these options to its end; returns its exit code. Its output is
        this actor's, which Ray shows on the driver.
        """
        # Through the shim, the kernel ends the launcher if this actor is killed.
        command = [*exec_shim.command(), sys.executable, "-m", "outlast.launch", "run", *options]
        self._process = subprocess.Popen(command, env=launcher_environment(environment))
        if self._stopped:
            self._process.terminate()
        return self._process.wait()

    def stop(self) -> None:
        """Tells the launcher to stop the whole job; its ranks save."""
        self._stopped = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)


def run_on_ray(
    arguments: Sequence[str],
    *,
    hosts: int | tuple[int, int],
    resources: Mapping[str, float],
    environment: Mapping[str, str] | None = None,
    run_id: str | None = None,
    timeout: float = 600.0,
) -> int:
    """Runs `outlast run` on nodes of the Ray cluster to which this process is connected, or which
    `ray.init()` finds.

    Args:
        arguments: the options and the script, as for `outlast run`, without those that say where
            the hosts are: `["--nproc-per-node", "8", "train.py", "--lr", "0.1"]`. The script is a
            path on the nodes.
        hosts: how many; or the least and the most, for `--nnodes`.
        resources: what one host reserves on its node, e.g. `{"CPU": 32, "GPU": 8}`.
        environment: variables for the workers, in addition to those of the Ray workers.
        run_id: the name of the run; by default a new one.
        timeout: how long Ray may take to find nodes for all hosts at the start, in seconds.

    Returns:
        The exit code of the job.

    Raises:
        LaunchError: if Ray finds no nodes for the hosts in time.
    """
    least, most = (hosts, hosts) if isinstance(hosts, int) else hosts
    if not 1 <= least <= most:
        raise ValueError(f"hosts={hosts!r}: the least must be at least 1, and at most the most")
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    if not ray.is_initialized():
        ray.init()
    group = placement_group([dict(resources)] * most, strategy="STRICT_SPREAD")
    try:
        if not group.wait(timeout):
            alive = [node for node in ray.nodes() if node["Alive"]]
            nodes = "; ".join(f"{n['NodeManagerAddress']}: {n['Resources']}" for n in alive)
            raise LaunchError(
                f"Ray found no {most} nodes with {dict(resources)} each within {timeout:g} s; "
                f"the cluster has {nodes or 'no nodes'}"
            )
        # The driver starts all launchers, so it can give them a secret that nobody has to make.
        variables = {"OUTLAST_TOKEN": secrets.token_hex(32), **(environment or {})}
        job = _Job(group, least, most, resources, variables, list(arguments))
        return job.run(run_id or f"ray-{uuid.uuid4().hex[:8]}")
    finally:
        remove_placement_group(group)


@dataclasses.dataclass
class _Job:
    """The driver's side: one actor for each bundle, and another one for each that is lost."""

    group: Any
    least: int
    most: int
    resources: Mapping[str, float]
    environment: dict[str, str] = dataclasses.field(repr=False)
    arguments: list[str]
    actors: dict[int, Any] = dataclasses.field(default_factory=dict)
    endpoints: dict[int, tuple[str, str]] = dataclasses.field(default_factory=dict)
    running: dict[Any, int] = dataclasses.field(default_factory=dict)  # bundle by future
    asked: dict[Any, int] = dataclasses.field(default_factory=dict)  # for its endpoint

    def run(self, run_id: str) -> int:
        import ray

        for bundle in range(self.most):
            self._start_actor(bundle)
        # At the start all launchers are told the same endpoints.
        for future, bundle in list(self.asked.items()):
            self.endpoints[bundle] = ray.get(future)
        self.asked.clear()
        for bundle in range(self.most):
            self._start_launcher(bundle, run_id)
        try:
            return self._watch(run_id)
        except KeyboardInterrupt:
            self._stop()
            return self._watch(run_id, replace=False)
        finally:
            for actor in self.actors.values():
                ray.kill(actor)

    def _watch(self, run_id: str, *, replace: bool = True) -> int:
        """Until the job has ended; returns its exit code."""
        import ray
        from ray.exceptions import RayActorError

        code: int | None = None
        deadline: float | None = None
        unfit = False
        while self.running or (self.asked and code is None):
            if deadline is not None and time.monotonic() > deadline:
                break
            waited_for = [*self.running, *self.asked]
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            for future in ray.wait(waited_for, num_returns=1, timeout=left)[0]:
                started = future in self.asked
                bundle = (self.asked if started else self.running).pop(future)
                try:
                    result = ray.get(future)
                except RayActorError as e:
                    print(f"host {bundle} is lost: {first_line(e)}", file=sys.stderr)
                    self.endpoints.pop(bundle, None)
                    if replace and code is None:
                        self._start_actor(bundle)
                    continue
                if started:
                    self.endpoints[bundle] = result
                    self._start_launcher(bundle, run_id)
                elif result < 0 and replace and code is None:
                    name = signal.Signals(-result).name
                    print(f"the launcher of host {bundle} was killed by {name}", file=sys.stderr)
                    self._start_launcher(bundle, run_id)
                elif result == UNFIT:  # the others go on, unless it is the code of the job
                    unfit = True
                else:  # launchers end together, with the code of the job
                    code = max(code or 0, result if result >= 0 else 128 - result)
                    deadline = deadline or time.monotonic() + _LAST_S
        return (UNFIT if unfit else 1) if code is None else code

    def _start_actor(self, bundle: int) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = (
            ray.remote(HostProcess)
            .options(
                num_cpus=self.resources.get("CPU", 0),
                num_gpus=self.resources.get("GPU", 0),
                resources={k: v for k, v in self.resources.items() if k not in ("CPU", "GPU")},
                max_concurrency=3,  # `stop` is called while `run` runs
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self.group, placement_group_bundle_index=bundle
                ),
            )
            .remote()
        )
        self.actors[bundle] = actor
        self.asked[actor.endpoint.remote()] = bundle

    def _start_launcher(self, bundle: int, run_id: str) -> None:
        # The same for all launchers at the start; later, those that a new one can ask.
        known = [self.endpoints[n][1] for n in sorted(self.endpoints)][:_ENDPOINTS]
        options = [
            f"--nnodes={self.least}:{self.most}",
            f"--rdzv-id={run_id}",
            f"--rdzv-endpoint={','.join(known)}",
            "--rdzv-conf=endpoints=differ",
            f"--local-addr={self.endpoints[bundle][0]}",
        ]
        future = self.actors[bundle].run.remote([*options, *self.arguments], self.environment)
        self.running[future] = bundle

    def _stop(self) -> None:
        import ray

        for bundle in set(self.running.values()):
            ray.get(self.actors[bundle].stop.remote())
            return  # one launcher tells the others
