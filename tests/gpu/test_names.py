"""Every name that this package relies on is in the libraries of torch and NCCL: in those installed,
or in an unpacked build for CUDA (`OUTLAST_TORCH_BUILD`; see `make cuda-names`). Needs no GPU.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outlast.inprocess import environment, nccl
from outlast.inprocess.interruption import flight_recorder, gloo, nccl_bootstrap

BUILD = Path(os.environ.get("OUTLAST_TORCH_BUILD", Path(torch.__file__).parents[1]))
TESTS = Path(__file__).parent
IN_SOURCE = re.compile(r"\b(?:TORCH_)?NCCL_[A-Z_]+[A-Z]\b")


def names_in(*paths: str) -> set[str]:
    """The environment variables of NCCL, and of torch for it, that these files name in strings."""
    return {name for path in paths for name in IN_SOURCE.findall(Path(path).read_text())}


VARIABLES = names_in(nccl.__file__, environment.__file__)
OF_TORCH = {name for name in VARIABLES if name.startswith("TORCH_")} | {
    "NCCL_BLOCKING_WAIT",  # their former names, which torch reads too
    "NCCL_DESYNC_DEBUG",
}
OF_NCCL = VARIABLES - OF_TORCH | names_in(str(TESTS / "sharing.py"))
GLOO = {gloo._ABORTS_SEND, gloo._ABORTS_RECV, *gloo._WAITS_IN}
GLOO |= {name.decode() for name in (gloo._BUFFER, gloo._PAIR)}
METHODS = {"wrapped_pg", "_get_backend_name", "_get_sequence_number_for_group", "get_debug_level"}
SIGNALS = gloo._SIGNALS.partition("ERK")[0]  # then the type of strings, which a build may choose


def library(pattern: str) -> Path:
    found = sorted(BUILD.glob(pattern))
    if not found:
        pytest.skip(f"no {pattern} in {BUILD}: not a build of torch for CUDA")
    return found[0]


def missing(path: Path, names: set[str], end: bytes = b"\0") -> list[str]:
    """The names that are no string or symbol in the library."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return sorted(name for name in names if content.find(name.encode() + end) < 0)


def versions(path: Path) -> Iterator[str]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for each in re.finditer(rb"NCCL version (\d+\.\d+\.\d+)", content):
            yield each[1].decode()


def test_the_names_are_found_in_the_source() -> None:
    assert {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_USE_COMM_NONBLOCKING"} <= OF_TORCH
    assert {"NCCL_NVLS_ENABLE", "NCCL_NET_PLUGIN", "NCCL_HOSTID"} <= OF_NCCL


def test_gloo() -> None:
    path = library("torch/lib/libtorch_cpu.so")
    assert not missing(path, GLOO)
    assert not missing(path, {SIGNALS}, end=b"")


def test_methods() -> None:
    path = library("torch/lib/libtorch_python.so")
    assert not missing(path, METHODS)
    assert len(missing(path, set(flight_recorder._DUMPS))) < len(flight_recorder._DUMPS)


def test_variables_of_torch() -> None:
    library("torch/lib/libtorch_cuda.so")
    assert not missing(library("torch/lib/libtorch_cuda.so"), OF_TORCH)
    assert not missing(library("torch/lib/libtorch_python.so"), {"_nccl_version", "abort"})


def test_nccl() -> None:
    path = library("nvidia/nccl/lib/libnccl.so*")
    assert not missing(path, OF_NCCL | {nccl_bootstrap._ROOT_THREAD})
    version = next(versions(path))
    print(f"NCCL {version}")
    assert nccl.Use((2, 13, 0), tuple(map(int, version.split("."))), {}).has_nccl((2,), (3,))
