"""The hosts of a Slurm job step: what `srun outlast run` need not be told.

`srun` starts the same command on every node of a step, and describes the step in environment
variables. From them come the number of hosts, the endpoints and the run ID, unless they are given
as options. srun's manual page documents the variables, under "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import zlib
from collections.abc import Iterator, Mapping

from outlast.launch.config.options import RunOptions

ENDPOINTS = 3
"""How many nodes serve as endpoints: the job can start, and a node can come late or come back, as
long as one of them is up.
"""

# Below the ports that Linux gives to outgoing connections (32768 and above), and above well-known
# ones. Two steps on one node get different ports, because the step's ID is part of the choice.
_FIRST_PORT, _PORTS = 15000, 15000


@dataclasses.dataclass(frozen=True)
class SlurmStep:
    """A job step with several nodes, and one task on each."""

    nodes: tuple[str, ...]  # their names, in Slurm's order
    run_id: str  # the same on all nodes, and for no other step: `JOB.STEP`
    node: str  # the name of this node

    @property
    def nnodes(self) -> str:
        return str(len(self.nodes))

    @property
    def endpoints(self) -> str:
        port = _FIRST_PORT + zlib.crc32(self.run_id.encode()) % _PORTS
        return ",".join(f"{node}:{port}" for node in self.nodes[:ENDPOINTS])


def in_step(options: RunOptions, step: SlurmStep | None) -> RunOptions:
    """The options, completed by the step in which the launcher runs, if there is one."""
    chosen = options.rdzv_endpoint or options.master_addr or options.standalone
    if step is None or chosen or options.nnodes in ("1", "1:1"):
        return options
    return dataclasses.replace(
        options,
        nnodes=options.nnodes or step.nnodes,
        rdzv_endpoint=step.endpoints,
        rdzv_backend="c10d",
        run_id=options.run_id or step.run_id,
    )


def slurm_step(variables: Mapping[str, str]) -> SlurmStep | None:
    """The step in which this process runs; `None` outside of a step, or if it has one node. A
    `ValueError` says that several tasks run on a node: every task would be a launcher.
    """
    nodelist = variables.get("SLURM_STEP_NODELIST", "")
    # Without a task: a batch script, or a shell in an allocation, which runs on one node only.
    if not nodelist or "SLURM_PROCID" not in variables:
        return None
    nodes = tuple(host_names(nodelist))
    if len(nodes) < 2:
        return None
    tasks = variables.get("SLURM_STEP_NUM_TASKS", str(len(nodes)))
    if tasks != str(len(nodes)):
        raise ValueError(
            f"srun starts {tasks} tasks on {len(nodes)} nodes, but outlast run is one task per "
            "node, and starts the workers itself: use srun --ntasks-per-node=1, and "
            "--nproc-per-node for the number of workers"
        )
    job, step = variables.get("SLURM_JOB_ID", "0"), variables.get("SLURM_STEP_ID", "0")
    return SlurmStep(nodes, f"{job}.{step}", variables.get("SLURMD_NODENAME", ""))


def switches(variables: Mapping[str, str]) -> list[str]:
    """The switches above this node, from the top; none without a topology plugin."""
    # The last part is the node, whose name may have dots.
    count = variables.get("SLURM_TOPOLOGY_ADDR_PATTERN", "node").count(".")
    return variables.get("SLURM_TOPOLOGY_ADDR", "").split(".", count)[:count]


def host_names(nodelist: str) -> Iterator[str]:
    """The names in Slurm's notation: `gpu[001-003,7],login` is gpu001 to gpu003, gpu7 and login; as
    `scontrol show hostnames`, which need not be installed in a container.
    """
    # Commas inside of brackets do not separate names.
    for expression in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist):
        parts = re.split(r"\[([^\[\]]*)\]", expression)
        # Odd parts were in brackets.
        choices = [
            list(_numbers(part, nodelist)) if n % 2 else [part] for n, part in enumerate(parts)
        ]
        yield from map("".join, itertools.product(*choices))


def _numbers(ranges: str, nodelist: str) -> Iterator[str]:
    for piece in ranges.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if found is None:
            raise ValueError(f"SLURM_STEP_NODELIST={nodelist!r} is not a list of nodes")
        first, last = found[1], found[2] or found[1]
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))
