"""Rounds on several hosts: the network that they have, and what happens to a host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from campaign import stand_in
from outlast.campaign import campaign, job, round
from outlast.campaign.campaign import CampaignError
from outlast.campaign.generate import Shape, parse_kinds
from outlast.campaign.network import Network, unavailable
from outlast.campaign.notes import STEP, notes_in, work_of
from outlast.campaign.plan import MOVES, OF_HOSTS, Action, LauncherFault, RoundPlan
from outlast.events.emitter import JsonlSink
from outlast.events.event import Note

PLAN = RoundPlan(seed=1, number=1, ranks=3, steps=20)


@pytest.fixture(scope="module")
def _allowed() -> None:
    if reason := unavailable():
        pytest.skip(reason)


@pytest.fixture
def network(tmp_path: Path, _allowed: None) -> Iterator[Network]:
    network = Network(2, tmp_path)
    yield network
    network.close()


def reach(network: Network, log: Path) -> str:
    """What h1 hears from a port of h2 at which nothing listens."""
    code = "import socket; socket.create_connection(('h2', 5), 1)"
    with log.open("wb") as output:
        network.start("h1", ["python3", "-c", code], os.environ, output).wait()
    return log.read_text().splitlines()[-1].partition(":")[0]


def test_a_host_that_is_cut_off_gets_no_answer(network: Network, tmp_path: Path) -> None:
    answers = [reach(network, tmp_path / "log")]
    network.cut_off("h2")
    answers.append(reach(network, tmp_path / "log"))
    network.connect("h2")
    answers.append(reach(network, tmp_path / "log"))
    assert answers == ["ConnectionRefusedError", "TimeoutError", "ConnectionRefusedError"]


def test_a_host_that_loses_power_is_replaced_by_a_fresh_one(
    network: Network, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("wb") as output:
        process = network.start("h2", ["sleep", "600"], os.environ, output)
        network.power_off("h2")
        assert process.wait() != 0
    network.boot("h2")
    assert reach(network, tmp_path / "log") == "ConnectionRefusedError"


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_allowed")
def test_a_round_of_moves_makes_no_step_again(tmp_path: Path) -> None:
    faults = tuple(LauncherFault(action, 5 + 15 * n) for n, action in enumerate(MOVES))
    plan = structs.replace(PLAN, steps=120, launcher=faults)
    result = stand_in.campaign(tmp_path, ranks=3)[0].replay(plan)
    assert not result.failures, result.rounds[0].problems
    assert [one.kind for one in result.fired] == [str(action) for action in MOVES]


def test_steps_that_were_made_again_are_found(tmp_path: Path) -> None:
    notes = JsonlSink(notes_in(work_of(tmp_path)))
    for rank, step in ((0, 1), (1, 1), (0, 2), (1, 2), (1, 2)):
        notes.write(Note(name=STEP, rank=rank, pid=1, data={"step": step, "loss": ""}))
    notes.close()
    assert round.steps_made_again(tmp_path) == ["steps were made again: 2 (rank 1)"]


@pytest.mark.slow
@pytest.mark.usefixtures("_allowed")
def test_a_round_on_hosts_of_which_one_after_another_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_CUT_OFF_S", 0.1)
    lost = (Action.HOST_CUT_OFF, Action.HOST_LOST)
    faults = tuple(LauncherFault(action, 2) for action in lost)
    plan = structs.replace(PLAN, launcher=faults)
    stand_in.use(monkeypatch, "slow")
    before = {process.pid for process in _unshared()}
    result = stand_in.campaign(tmp_path)[0].replay(plan)
    assert not result.failures, result.rounds[0].problems
    assert [one.kind for one in result.fired] == ["host_cut_off", "host_lost"]
    assert result.rounds[0].exit_codes == [0, 0, 0]
    assert {process.pid for process in _unshared()} <= before


def test_without_network_namespaces_these_faults_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "unavailable", lambda: "they need root")
    running, output = stand_in.campaign(tmp_path)
    shape = Shape(ranks=4, faults=4, kinds=parse_kinds([]))
    assert not set(OF_HOSTS) & set(running._possible(shape).kinds)
    names = ", ".join(map(str, OF_HOSTS))
    assert output.getvalue() == f"without {names}: they need root\n"
    for ranks, why in ((4, "they need root"), (2, "2 ranks cannot share them equally")):
        only, _ = stand_in.campaign(tmp_path, ranks=ranks, kinds="host_lost")
        with pytest.raises(
            CampaignError, match=f"without three hosts or more there is no host_lost: {why}"
        ):
            only.run()


def _unshared() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if one.name() == "unshare"]
