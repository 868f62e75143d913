"""One rank raises in its part of an agreement: `python leaves.py leaves FOLDER POINT...`.

At each point the named rank raises where the others wait for it. All ranks print what they raise,
and make the next checkpointer. The timeouts are the usual ones: half an hour.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import RANK, join_group, leave_group, main, meet, say, scenario

from async_checkpoint.checkpoints import NET, blank, state_of
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.trust import trusted

ROOM = "outlast.async_checkpoint"


def opens(path: Path, made: list[Checkpointer]) -> None:
    made.append(Checkpointer(path))
    made[0].restore(blank())  # a rank that comes this far learns here that the other one did not


def restores(path: Path, made: list[Checkpointer]) -> None:
    made[0].restore(blank())


def saves(path: Path, made: list[Checkpointer]) -> None:
    made[0].save(2, state_of(2)).wait(NET)


def saves_again(path: Path, made: list[Checkpointer]) -> None:
    """The structure is known, so the ranks agree in the background."""
    made[0].save(1, state_of(1)).wait(NET)
    meet()
    armed()
    made[0].save(2, state_of(2)).wait(NET)


def looks(path: Path, made: list[Checkpointer]) -> None:
    made[0].restorer.newest(0)


def asks(path: Path, made: list[Checkpointer]) -> None:
    made[0].restorer.ranks.gather(None, lambda _: trusted(made[0]))  # as a job does


UNICODE = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
# By name: what is done, the rank that raises, where, and what.
POINTS: dict[str, tuple[Any, int, str, BaseException]] = {
    "identity": (opens, 0, "storage.local:LocalStorage.identity", UNICODE),
    "lock": (opens, 0, "storage.local:LocalStorage.lock", RuntimeError("no lock")),
    "session": (opens, 1, "checkpointer:session_for", ModuleNotFoundError("no module")),
    "left": (opens, 1, "save.folder_session:FolderSession.take_over", KeyError("taken")),
    "interrupt": (opens, 1, "checkpointer:keep_events_beside", KeyboardInterrupt()),
    "snapshots": (restores, 1, "restore.restorer:Restorer.snapshots", RuntimeError("held")),
    "candidates": (restores, 0, "restore.restorer:candidates", ValueError("listed")),
    "observer": (restores, 1, "restore.restorer:notify", KeyboardInterrupt()),
    "manifest": (restores, 0, "restore.restorer:read_manifest", RecursionError("deep")),
    "fit": (restores, 1, "restore.restorer:fit", ZeroDivisionError("fits")),
    "load": (restores, 1, "restore.restorer:load", MemoryError("full")),
    "newest": (looks, 0, "restore.restorer:candidates", RuntimeError("newest")),
    "trust": (asks, 0, "trust:_limit", UNICODE),
    "items": (saves, 1, "save.structures:StructureMemo.items", KeyboardInterrupt()),
    "plans": (saves, 0, "save.structures:StructureMemo.plans", RuntimeError("plans")),
    "snapshot": (saves, 1, "snapshot.snapshot:Snapshotter.take", SystemExit(3)),
    "write": (saves, 1, "save.save:Save.write", RuntimeError("write")),
    "commit": (saves, 0, "save.structures:Catalog.manifest", UNICODE),
    "background": (
        saves_again,
        0,
        "save.round:SaveRound.begin",
        RuntimeError("unchanged"),
    ),
}
armed: Callable[[], None] = lambda: None  # noqa: E731


def raise_at(where: str, error: BaseException, patch: pytest.MonkeyPatch) -> None:
    module, _, name = where.partition(":")
    target: Any = importlib.import_module(f"{ROOM}.{module}")
    for part in name.split(".")[:-1]:
        target = getattr(target, part)

    def fail(*_: object, **__: object) -> None:
        raise error

    patch.setattr(target, name.rsplit(".", 1)[-1], fail)


@scenario
def leaves(path: str, *names: str) -> None:
    global armed
    join_group()
    for name in names:
        work, rank, where, error = POINTS[name]
        folder = Path(path) / name
        if work is not saves_again:
            with Checkpointer(folder) as before:
                before.save(1, state_of(1)).wait(NET)
        made = [] if work is opens else [Checkpointer(folder)]
        meet()
        with pytest.MonkeyPatch.context() as patch:

            def arm(
                rank: int = rank,
                where: str = where,
                error: BaseException = error,
                patch: pytest.MonkeyPatch = patch,
            ) -> None:
                if rank == RANK:
                    raise_at(where, error, patch)

            armed = arm
            if work is not saves_again:
                arm()
            try:
                work(folder, made)
                say("returned", point=name)
            except BaseException as e:  # noqa: BLE001 - printed
                say("raised", point=name, type=type(e).__name__, message=str(e))
        for each in made:
            each.abort()
        meet()
        with Checkpointer(folder) as after:  # the next one works
            assert after.restore(blank()) in (1, 2)  # a snapshot of step 2 may be in memory
            after.save(3, state_of(3)).wait(NET)
        meet()
    leave_group()


if __name__ == "__main__":
    main()
