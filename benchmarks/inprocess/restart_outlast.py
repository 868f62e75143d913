"""Restart latency of `outlast.inprocess`: faults of one kind in a row, in one job."""

from __future__ import annotations

import dataclasses
import functools
import time

import torch.distributed as dist

from benchmarks.inprocess.phases import Milestones, milestones
from benchmarks.lib.faults import RANKS, body
from benchmarks.lib.rank_processes import RankProcesses, wrapped
from benchmarks.lib.timestamp_board import TimestampBoard
from outlast import inprocess

__all__ = ["Latencies", "measure"]

NET_S = 120.0
QUIET_S = 0.05


@dataclasses.dataclass
class Latencies:
    """Seconds, one value per fault.

    Attributes:
        restart: from the fault to the last survivor's entry into the function.
        rejoin: from a replacement's call of the wrapped function to the last entry of all ranks.
        phases: the phases of the restart, see `phases.py`.
    """

    restart: list[float]
    rejoin: list[float]
    phases: Milestones


def measure(kind: str, faults: int) -> Latencies:
    """All timeouts have their defaults, including those of collectives (30 minutes for gloo)."""
    board = TimestampBoard(RANKS, 4 * faults + 64)
    with RankProcesses(f"ours-{kind}", RANKS) as processes:
        processes.env["OUTLAST_EVENTS_DIR"] = str(processes.folder)
        processes.start_all(lambda slot: _rank(board, slot, kind, faults))
        _attend(processes, board, kind, faults)
        spans = _spans(board, replaced=kind == "sigkill")
        return Latencies(
            restart=[end - start for start, end in spans],
            rejoin=[_rejoin(board, number) for number in range(board.joins)],
            phases=milestones(processes.folder, spans),
        )


def _rank(board: TimestampBoard, slot: int, kind: str, faults: int) -> None:
    def train(call: inprocess.CallWrapper) -> None:
        body(board, slot, call.iteration, kind, faults, lambda: dist.init_process_group("gloo"))

    wrapped(train, inprocess.Wrapper(repeated_faults=None))()


def _attend(processes: RankProcesses, board: TimestampBoard, kind: str, faults: int) -> None:
    """Replaces killed ranks, once the survivors have restarted, until all ranks have returned."""
    running, deadline = set(range(RANKS)), time.monotonic() + NET_S
    seen = 0
    while running:
        for slot in processes.ended(0.25):
            processes.check(allowed=(0, -9))
            if processes.codes[slot] == 0:
                running.discard(slot)
                continue
            _await_survivors(processes, board, slot, deadline)
            time.sleep(QUIET_S)  # forking the replacement occupies a core briefly
            processes.start(
                slot,
                functools.partial(_replacement, board, slot, kind, faults),
                {"OUTLAST_REPLACEMENT": "1"},
            )
        if board.faults > seen:
            seen, deadline = board.faults, time.monotonic() + NET_S
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{kind}: stuck after {seen} of {faults} faults\n{processes.last_output()}"
            )


def _replacement(board: TimestampBoard, slot: int, kind: str, faults: int) -> None:
    board.join()
    _rank(board, slot, kind, faults)


def _await_survivors(
    processes: RankProcesses, board: TimestampBoard, dead: int, deadline: float
) -> None:
    fault = _faults(board)[-1]
    while set(board.entries_after(fault[0])) < set(range(RANKS)) - {dead}:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the survivors of slot {dead} did not go on\n{processes.last_output()}"
            )
        time.sleep(0.05)


def _faults(board: TimestampBoard) -> list[tuple[float, int]]:
    found = (board.fault(k) for k in range(min(board.newest + 1, board.iterations)))
    return [fault for fault in found if fault is not None]


def _spans(board: TimestampBoard, *, replaced: bool) -> list[tuple[float, float]]:
    """The time of each fault, and when the last survivor had entered the function again."""
    spans = []
    for moment, victim in _faults(board):
        entries = board.entries_after(moment)
        survivors = set(range(RANKS)) - ({victim} if replaced else set())
        spans.append((moment, max(entries[slot] for slot in survivors)))
    return spans


def _rejoin(board: TimestampBoard, number: int) -> float:
    asked = board.join_time(number)
    return max(board.entries_after(asked).values()) - asked
