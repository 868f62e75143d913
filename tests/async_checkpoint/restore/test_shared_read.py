"""Ranks on several hosts that load the same: one of them reads each chunk, and it is passed on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from async_checkpoint.checkpoints import folder_of
from outlast.async_checkpoint.restore.shared_read import Routes, sharers
from outlast.async_checkpoint.storage.manifest import CHUNK_BYTES
from procs import Job

Ranks = Callable[..., Job]
HOSTS = ("a", "b", "b", "c", "a")


@hypothesis.given(st.lists(st.integers(1, 9), min_size=2, max_size=12), st.data())
def test_each_chunk_reaches_each_rank_once_and_each_host_once(
    sizes: list[int], data: st.DataObject
) -> None:
    shuffled = iter(data.draw(st.permutations(range(sum(sizes)))))
    hosts = [[next(shuffled) for _ in range(size)] for size in sizes]
    host_of = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
    routes = {rank: Routes(hosts, rank) for rank in host_of}
    turns = []
    for number in range(len(host_of)):
        ways = {rank: each.route(number) for rank, each in routes.items()}
        (reader,) = (rank for rank, (sender, _) in ways.items() if sender is None)
        turns.append(reader)
        sent = [(rank, to) for rank, (_, receivers) in ways.items() for to in receivers]
        assert sorted(sent) == sorted((s, to) for to, (s, _) in ways.items() if s is not None)
        between = [host_of[to] for rank, to in sent if host_of[rank] != host_of[to]]
        assert sorted(between) == sorted(set(range(len(hosts))) - {host_of[reader]})
        assert max(len(receivers) for _, receivers in ways.values()) <= 3
        have, depth = {reader}, 0
        while len(have) < len(ways):
            have |= {to for rank, to in sent if rank in have}
            depth += 1
        assert depth <= len(hosts).bit_length() + max(sizes)
    assert sorted(turns) == sorted(host_of)
    assert len({host_of[each] for each in turns[: len(hosts)]}) == len(hosts)


def test_who_shares() -> None:
    loads = [("a", "x"), ("a", "y"), ("b", "x"), ("b", ""), ("a", "x"), ("c", "z"), ("c", "z")]
    assert sharers(loads) == {"x": [[0, 4], [2]]}
    assert sharers(loads, only_all=True) == {}
    assert sharers([("a", "x"), ("b", "x")], only_all=True) == {"x": [[0], [1]]}
    found = sharers(loads, is_cached=False)
    assert found == {"x": [[0, 4], [2]], "z": [[5, 6]]}


@pytest.fixture
def path(tmp_path: Path, ranks: Ranks) -> Path:
    """Checkpoints of steps 1 and 2."""
    with ranks("shared_reads", "saves", str(tmp_path / "c"), nprocs=1) as job:
        job.start_all()
        assert job.wait_all() == {0: 0}, job.errors(0)
    return tmp_path / "c"


def outcomes(
    ranks: Ranks, scenario: str, path: Any, hosts: Any = HOSTS, also: str = ""
) -> list[Any]:
    """What each rank said; the bytes that all have read of storage; events of the kind `also`."""
    with ranks("shared_reads", scenario, str(path), nprocs=len(hosts)) as job:
        for rank, host in enumerate(hosts):
            job.start(rank, {"OUTLAST_HOST": host, "LOCAL_WORLD_SIZE": str(hosts.count(host))})
        ended = job.wait_all()
        assert set(ended.values()) == {0}, [job.errors(rank) for rank in ended]
        found = [
            next(e for e in job.lines(r) if e["event"] in ("returned", "raised")) for r in ended
        ]
        lines = [line for rank in ended for line in job.lines(rank)]
        read = sum(line["bytes"] for line in lines if line["event"] == "read")
        return [found, read, *([[e for e in lines if e["event"] == also]] if also else [])]


def size_of(path: Path, step: int) -> int:
    """Of the tensors, in files."""
    folder = folder_of(path, step)
    return sum(each.stat().st_size for each in folder.glob("*.distcp"))


@pytest.mark.parametrize(
    ("scenario", "hosts"),
    [
        ("reads", ("a", "b")),
        pytest.param("reads", HOSTS, marks=pytest.mark.slow),
        pytest.param("reads_with_broadcasts", HOSTS, marks=pytest.mark.slow),
    ],
)
def test_storage_gives_each_byte_once(
    ranks: Ranks, path: Path, scenario: str, hosts: tuple[str, ...]
) -> None:
    found, read = outcomes(ranks, scenario, path, hosts)
    assert {each["value"] for each in found} == {2}
    whole = size_of(path, 2)
    # A chunk that two batches need is read for each. Values are read by each rank.
    assert whole <= read <= whole + 4 * CHUNK_BYTES + len(hosts) * 10_000, (read, whole)


@pytest.mark.parametrize("protocol", ["", "local://"])
def test_ranks_of_one_host_read_themselves_what_its_page_cache_has(
    ranks: Ranks, path: Path, protocol: str
) -> None:
    found, read = outcomes(ranks, "reads", f"{protocol}{path}", ("a", "a"))
    assert {each["value"] for each in found} == {2}
    whole = size_of(path, 2)
    assert (read >= 2 * (whole - 10_000)) == (not protocol), (read, whole)


@pytest.mark.slow
def test_a_damaged_byte_is_found_once_and_all_take_the_checkpoint_before(
    ranks: Ranks, path: Path
) -> None:
    file = folder_of(path, 2) / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[9_000_000] ^= 1
    file.write_bytes(content)
    found, _ = outcomes(ranks, "reads", path)
    assert {each["value"] for each in found} == {1}


@pytest.mark.slow
def test_a_rank_that_cannot_read_its_share_is_named_and_no_older_checkpoint_is_taken(
    ranks: Ranks, path: Path
) -> None:
    found, _, tried = outcomes(ranks, "cannot_read", path, also="tried")
    assert {each["type"] for each in found} == {"CheckpointReadError"}, found
    assert max(each["chunks"] for each in tried) == 1  # nothing after the first error
    assert all("rank 1 on " in each["message"] for each in found)
    assert "Input/output error" in json.dumps(found)


@pytest.mark.slow
def test_what_arrives_damaged_is_read_from_storage(ranks: Ranks, path: Path) -> None:
    found, read = outcomes(ranks, "arrives_damaged", path)
    assert {each["value"] for each in found} == {2}
    assert read > 1.1 * size_of(path, 2)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["has_no_memory", "has_no_memory_with_broadcasts"])
def test_a_rank_with_an_error_of_its_own_passes_on_what_the_others_need(
    ranks: Ranks, path: Path, scenario: str
) -> None:
    found, _ = outcomes(ranks, scenario, path)
    assert [each["type"] for each in found] == [
        "MemoryError" if rank == 2 else "CheckpointError" for rank in range(len(HOSTS))
    ]
    assert all("no memory for a part" in each["message"] for each in found), found


@pytest.mark.slow
def test_a_fault_in_between_is_followed_by_a_restore_in_place(ranks: Ranks, path: Path) -> None:
    found, _ = outcomes(ranks, "fault_in_between", path)
    assert [each["value"] for each in found] == [2] * len(HOSTS)
