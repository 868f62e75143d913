"""The environment variables of the launcher; errors name the invalid variable."""

from __future__ import annotations

import os

import pytest

from outlast.inprocess.environment import (
    Launch,
    exported,
    publish_rank,
    read_launch,
    store_endpoint,
)

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "OUTLAST_REPLACEMENT",
    "OUTLAST_EVENTS_DIR",
)
AGENT_NAMES = ("OUTLAST_AGENT", "OUTLAST_STORE", "OUTLAST_HOST", "OUTLAST_HOST_ADDR")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, *AGENT_NAMES):
        monkeypatch.delenv(name, raising=False)


def place() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in NAMES}


def test_without_a_launcher_there_is_one_rank() -> None:
    assert read_launch() == Launch(0, 1, None, None, False, 0, 0, "")
    assert store_endpoint() is None


def test_everything_that_a_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(
        NAMES, ["3", "8", "node1", "29500", "True", "2", "1", "/events"], strict=True
    ):
        monkeypatch.setenv(name, value)
    assert read_launch() == Launch(3, 8, "node1", 29500, True, 2, 1, "/events")
    assert store_endpoint() is None, "the store of the job, not of an iteration"


def test_what_the_launcher_of_a_job_on_several_hosts_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    for name, value in zip(AGENT_NAMES, ["1", "[::1]:4000", "h2-1f", "10.0.0.2"], strict=True):
        monkeypatch.setenv(name, value)
    launch = read_launch()
    assert (launch.host, launch.port) == ("::1", 4000)
    assert (launch.agent, launch.host_id, launch.host_address) == (True, "h2-1f", "10.0.0.2")
    assert store_endpoint() is None


@pytest.mark.parametrize("text", ["4000", ":4000", "node1:", "node1:0", "node1:70000", "node1:x"])
def test_a_store_that_is_no_address_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_STORE", text)
    with pytest.raises(ValueError, match=r"OUTLAST_STORE=.* is not HOST:PORT"):
        read_launch()


@pytest.mark.parametrize(
    "name",
    ["RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "OUTLAST_REPLACEMENT"],
)
def test_what_is_no_number_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "two")
    with pytest.raises(ValueError, match=rf"^{name}='two' is not a whole number$"):
        read_launch()


@pytest.mark.parametrize(
    ("rank", "size"), [("-1", "2"), ("2", "2"), ("0", "0")], ids=["below", "beyond", "no ranks"]
)
def test_a_rank_out_of_the_world_is_named(
    rank: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ValueError, match=f"RANK={rank} .* WORLD_SIZE={size}"):
        read_launch()


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_a_port_out_of_range_is_named(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ValueError, match=f"MASTER_PORT={port} "):
        read_launch()


def test_many_ranks_need_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="MASTER_PORT is not set"):
        read_launch()


def test_a_place_is_published_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    before = place()
    with pytest.raises(KeyError), exported():
        publish_rank(1, 2, (0, 2, 7), ("node1", 4000))
        assert store_endpoint() == ("node1", 4000)
        assert read_launch() == Launch(1, 2, "node1", 4000, True, 7, 0, "")
        raise KeyError
    assert place() == before
