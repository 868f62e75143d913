"""What is known to break with NCCL: by its version, by torch's, and by environment variables.

`CONDITIONS` is the one table: `docs/gpu.md` has its lines, and a test compares the two. In a
process that uses NCCL, those that hold are logged once.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from outlast.inprocess.environment import is_first_on_host, nccl_environment
from outlast.system import devices

log = logging.getLogger("outlast.inprocess")

_ON = ("1", "y", "yes", "t", "true")  # what torch's `ProcessGroupNCCL` takes for true, in any case
_PYTORCH = "https://github.com/pytorch/pytorch"
_GROUP = f"{_PYTORCH}/blob/main/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
_NVRX = "https://github.com/NVIDIA/nvidia-resiliency-ext/blob/main"
_NVRX_GUIDE = f"{_NVRX}/docs/source/inprocess/usage_guide.rst"
_ABORTED = "torch may abort a collective by itself: after a fault, a checkpoint is loaded"
_ENDED = "torch ends the process when a collective fails: its rank is replaced"


@dataclass(frozen=True)
class Use:
    """What a process uses NCCL with. `nccl` is empty if its version is not known. `detail` is
    `TORCH_DISTRIBUTED_DEBUG=DETAIL`; `nvls`: several ranks, on devices that may have NVLink SHARP.
    """

    torch: tuple[int, ...]
    nccl: tuple[int, ...]
    environment: Mapping[str, str]
    detail: bool = False
    nvls: bool = False

    def on(self, name: str, former: str = "") -> bool:
        """Whether torch takes the variable for true, or if it is not set, the one of old."""
        return self.environment.get(name, self.environment.get(former, "")).lower() in _ON

    def has_nccl(self, first: tuple[int, ...], fixed: tuple[int, ...]) -> bool:
        return bool(self.nccl) and first <= self.nccl < fixed

    def does_not_block(self) -> bool:
        """Torch 2.7.0 chose it by itself for `device_id=`."""
        name = "TORCH_NCCL_USE_COMM_NONBLOCKING"
        return self.on(name) or (name not in self.environment and self.torch == (2, 7, 0))


@dataclass(frozen=True)
class Condition:
    """`when` says in words when it `holds`; `source` is public."""

    when: str
    holds: Callable[[Use], bool]
    effect: str
    remedy: str
    source: str

    def __str__(self) -> str:
        return f"{self.when}: {self.effect}. Remedy: {self.remedy}".replace("`", "")


CONDITIONS = (
    Condition(
        "`TORCH_NCCL_ASYNC_ERROR_HANDLING` is 1 or 2 in the function, or "
        "`TORCH_NCCL_BLOCKING_WAIT` or `NCCL_BLOCKING_WAIT` is 1",
        lambda use: (
            use.environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") in ("1", "2")
            or use.on("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
        ),
        _ABORTED,
        "leave them out",
        _GROUP,
    ),
    Condition(
        "`TORCH_NCCL_ASYNC_ERROR_HANDLING` is 3, or `TORCH_NCCL_RETHROW_CUDA_ERRORS` is 1",
        lambda use: (
            use.environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "3"
            or use.on("TORCH_NCCL_RETHROW_CUDA_ERRORS")
        ),
        _ENDED,
        "leave it out",
        _NVRX_GUIDE,
    ),
    Condition(
        "`TORCH_DISTRIBUTED_DEBUG=DETAIL`, `TORCH_NCCL_DESYNC_DEBUG=1` or `NCCL_DESYNC_DEBUG=1`",
        lambda use: use.detail or use.on("TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG"),
        _ENDED,
        "set it only to look for an error",
        _GROUP,
    ),
    Condition(
        "NVLink SHARP is not off, on devices of compute capability 9.0 or more",
        lambda use: use.nvls and use.environment.get("NCCL_NVLS_ENABLE") != "0",
        "an abort may hang or fail",
        "`NCCL_NVLS_ENABLE=0`",
        _NVRX_GUIDE,
    ),
    Condition(
        "NCCL 2.28.3 to 2.28.8",
        lambda use: use.has_nccl((2, 28, 3), (2, 28, 9)),
        "NVIDIA advises against it for restarts in place",
        "NCCL 2.28.9 or newer",
        f"{_NVRX}/README.md",
    ),
    Condition(
        "NCCL 2.26 with `TORCH_NCCL_USE_COMM_NONBLOCKING=1`, or torch 2.7.0 with `device_id=`",
        lambda use: use.has_nccl((2, 26), (2, 27)) and use.does_not_block(),
        "collectives hang at random",
        "`TORCH_NCCL_USE_COMM_NONBLOCKING=0`",
        f"{_PYTORCH}/issues/153960",
    ),
    Condition(
        "`TORCH_NCCL_USE_COMM_NONBLOCKING=1` without `TORCH_NCCL_NONBLOCKING_TIMEOUT`",
        lambda use: (
            use.on("TORCH_NCCL_USE_COMM_NONBLOCKING")
            and "TORCH_NCCL_NONBLOCKING_TIMEOUT" not in use.environment
        ),
        "a rank that makes a communicator while another one fails is ended by the hard timeout",
        "leave it out, or set a timeout below the hard timeout",
        f"{_PYTORCH}/blob/main/torch/csrc/distributed/c10d/NCCLUtils.cpp",
    ),
    Condition(
        "NCCL 2.25",
        lambda use: use.has_nccl((2, 25), (2, 26)),
        "an abort hangs",
        "NCCL 2.26.2 or newer",
        f"{_PYTORCH}/issues/149153",
    ),
    Condition(
        "NCCL before 2.24.1 without `NCCL_NET_PLUGIN=none`",
        lambda use: (
            use.has_nccl((0,), (2, 24, 1)) and use.environment.get("NCCL_NET_PLUGIN") != "none"
        ),
        "a restart in place initializes the plugin for the network twice",
        "`NCCL_NET_PLUGIN=none`, if you need no plugin",
        f"{_NVRX}/docs/source/release-notes.md",
    ),
    Condition(
        "torch before 2.8",
        lambda use: use.torch < (2, 8),
        "an abort hangs while several pairs of ranks send and receive in one group",
        "torch 2.8 or newer, or a `new_group` for each pair",
        f"{_PYTORCH}/pull/150690",
    ),
)


def warn_of_conditions() -> None:
    """Logs those that hold, once in a process, as soon as it uses NCCL and a device."""
    if _uses_nccl() and devices.in_use() is not None:
        _warn()


def aborted_by_torch() -> str:
    """Why torch may end a device's collective first, with garbage as its result; else empty."""
    use = _present_use() if _uses_nccl() else None
    ending = [each for each in CONDITIONS if each.effect == _ABORTED]
    return "; ".join(str(each) for each in ending if use and each.holds(use))


@functools.cache
def _warn() -> None:
    use = _present_use()
    versions = [".".join(map(str, each)) or "?" for each in (use.torch, use.nccl)]
    for each in CONDITIONS:
        if is_first_on_host() and each.holds(use):
            log.warning("torch %s, NCCL %s: %s (%s)", *versions, each, each.source)


def _uses_nccl() -> bool:
    available = dist.is_available()
    kinds = list(dist.distributed_c10d._world.pg_backend_config.values()) if available else []
    return any("nccl" in kind for kind in kinds)


def _present_use() -> Use:
    accelerator, group = devices.in_use(), dist.distributed_c10d._world.default_pg
    several = group is not None and group.size() > 1
    return Use(
        tuple(map(int, re.findall(r"\d+", torch.__version__)[:3])),
        accelerator.nccl_version() if accelerator else (),
        nccl_environment(),
        detail=dist.get_debug_level().name == "DETAIL",  # type: ignore[attr-defined]
        nvls=several and accelerator is not None and accelerator.may_have_nvls(),
    )
