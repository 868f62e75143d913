"""The environment variables, and the errors for invalid values."""

from __future__ import annotations

import pytest

from outlast.elastic import (
    checkpoint_path,
    from_ray,
    num_replicas,
    num_restarts,
    replica_rank,
)


def test_nothing_is_set() -> None:
    assert checkpoint_path() is None
    assert (replica_rank(), num_replicas(), num_restarts()) == (0, 1, 0)
    assert not from_ray()


def test_ours_come_before_the_launchers_and_those_before_adaptdls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ADAPTDL_CHECKPOINT_PATH", "/adaptdl")
    monkeypatch.setenv("ADAPTDL_NUM_REPLICAS", "4")
    monkeypatch.setenv("ADAPTDL_REPLICA_RANK", "3")
    monkeypatch.setenv("ADAPTDL_NUM_RESTARTS", "5")
    assert checkpoint_path() == "/adaptdl"
    assert (replica_rank(), num_replicas(), num_restarts()) == (3, 4, 5)

    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "6")
    assert (replica_rank(), num_replicas(), num_restarts()) == (2, 3, 6)

    monkeypatch.setenv("OUTLAST_CHECKPOINT_PATH", "/ours")
    monkeypatch.setenv("OUTLAST_NUM_REPLICAS", "2")
    monkeypatch.setenv("OUTLAST_REPLICA_RANK", "1")
    monkeypatch.setenv("OUTLAST_NUM_RESTARTS", "7")
    assert checkpoint_path() == "/ours"
    assert (replica_rank(), num_replicas(), num_restarts()) == (1, 2, 7)


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTLAST_CHECKPOINT_PATH", "")
    monkeypatch.setenv("OUTLAST_NUM_RESTARTS", "")
    assert checkpoint_path() is None
    monkeypatch.setenv("ADAPTDL_NUM_RESTARTS", "2")
    assert num_restarts() == 2


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("OUTLAST_REPLICA_RANK", "first", "OUTLAST_REPLICA_RANK='first' is not a whole number"),
        ("OUTLAST_REPLICA_RANK", "-1", "OUTLAST_REPLICA_RANK=-1 must be at least 0"),
        ("OUTLAST_REPLICA_RANK", "1", "OUTLAST_REPLICA_RANK=1 must be below OUTLAST_NUM_REPLICAS"),
        ("RANK", "1", "RANK=1 must be below"),
        ("ADAPTDL_REPLICA_RANK", "0.5", "ADAPTDL_REPLICA_RANK='0.5'"),
        ("OUTLAST_NUM_REPLICAS", "0", "OUTLAST_NUM_REPLICAS=0 must be at least 1"),
        ("WORLD_SIZE", "many", "WORLD_SIZE='many'"),
    ],
)
def test_a_wrong_place_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    for function in (replica_rank, num_replicas):
        with pytest.raises(ValueError, match=said):
            function()


@pytest.mark.parametrize("value", ["-1", "twice"])
def test_a_wrong_number_of_restarts_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("ADAPTDL_NUM_RESTARTS", value)
    with pytest.raises(ValueError, match="ADAPTDL_NUM_RESTARTS="):
        num_restarts()
