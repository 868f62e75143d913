"""For all tests: leak checks, hypothesis without deadlines, and fixtures that start processes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from etcd_cluster import Cluster, etcd_is_installed, require_etcd
from leaks import no_leaks
from procs import Job
from zygote import Zygote

# torch resolves the name of every peer; a resolver that drops the query would cost five seconds per
# connection.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A shell without job control starts what it runs in the background with SIGINT ignored, and every
# process that a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_SLOW_LIMIT_S = 600

# No deadline: the machine is shared, and a property is true or false at any speed.
_PROFILE = {"deadline": None, "print_blob": True}
hypothesis.settings.register_profile("some", max_examples=25, derandomize=True, **_PROFILE)
hypothesis.settings.register_profile("all", max_examples=100, **_PROFILE)


@pytest.fixture(autouse=True, scope="session")
def _what_libraries_hold_for_life() -> None:
    """Makes libuv open the pipe that it opens once, at the first store, and never closes.

    Otherwise the first test with a store would seem to leak it.
    """
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    # Set up before any fixture that a test requests, and therefore torn down last.
    with no_leaks():
        yield


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Starts rank processes and launchers by fork, with torch already imported."""
    with Zygote() as zygote:
        zygote.share()
        yield zygote


@pytest.fixture(scope="session")
def etcd_if_installed() -> Iterator[Cluster | None]:
    """An etcd of one member, for tests that do it no harm; `None` where etcd is not installed."""
    if not etcd_is_installed():
        yield None
        return
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def etcd(etcd_if_installed: Cluster | None) -> Cluster:
    """An etcd of one member. Skips the test where etcd is not installed."""
    require_etcd()
    assert etcd_if_installed is not None
    return etcd_if_installed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB. Skips the test where none can be mounted."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def ranks(tmp_path: Path, zygote: Zygote, request: pytest.FixtureRequest) -> Callable[..., Job]:
    """`ranks("script", "scenario", nprocs=2)`: a job of a scenario of `script.py`, which is in
    the folder `scripts` of the test's package.
    """

    def job(script: str, *args: str, nprocs: int = 2, **kwargs: Any) -> Job:
        room = next(f for f in request.path.parents if (f / "scripts").is_dir())
        path = room / "scripts" / f"{script}.py"
        return Job(tmp_path, path, nprocs=nprocs, args=args, spawn=zygote.spawn, **kwargs)

    return job


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test-all` passes this option, `make test` does not."""
    parser.addoption(
        "--all", action="store_true", help="also run tests marked slow, and more examples of each"
    )
    parser.addoption(
        "--fewer-cases",
        action="store_true",
        help="of a test with several cases, run every fourth one: in CI, after `make test`",
    )


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("all" if config.getoption("--all") else "some")
    # Where it sees these, pytest makes whole diffs: that of two times 32 KiB takes longer than a
    # test may, which is then reported as a crash.
    for name in ("CI", "BUILD_NUMBER"):
        os.environ.pop(name, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects slow tests unless `--all` is given, and gives them a longer limit, which is only a
    net against hangs; skips tests of what this machine or this torch does not have.
    """
    slow = [item for item in items if item.get_closest_marker("slow")]
    for item in slow:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SLOW_LIMIT_S))
    if not config.getoption("--all"):
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    if config.getoption("--fewer-cases"):
        cases: dict[str, list[pytest.Item]] = {}
        for item in items:
            if not item.get_closest_marker("exhaustive"):
                cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        left = [each[::4] for each in cases.values()]
        others = {item for each in cases.values() for item in each}.difference(*left)
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    if not hasattr(torch.cpu.Stream, "record_event"):
        for item in items:
            if item.get_closest_marker("fsdp2"):
                item.add_marker(pytest.mark.skip(reason="FSDP2 of this torch needs a GPU"))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Freezes all imported objects, so that a collection after a test takes milliseconds."""
    gc.collect()
    gc.freeze()
