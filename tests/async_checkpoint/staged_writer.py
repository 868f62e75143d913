"""A writer process whose storage follows the plan of a test, and records its operations.

`python -m async_checkpoint.staged_writer` is the real writer in all other respects. A test makes a
`Plan`, and `plan.use()` makes checkpointers of this process start this writer.

The plan is a file, read again at every operation: a list of rules such as

    {"op": "put", "name": "manifest.json", "do": "kill"}

with an action before (or, with `"when": "after"`, after) each operation that matches: `kill` this
process, `wait` at a gate, or fail with an errno such as `ENOSPC`. `"number": 3` matches the third
operation of this process, not counting removals.
"""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

from async_checkpoint.calls.work import Gate

PLAN = "OUTLAST_TEST_PLAN"
TESTS = str(Path(__file__).parents[1])


class Plan:
    """The test's side. `folder` contains the plan, the gates and the notes of all writers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._options: dict[str, Any] = {}
        if not (folder / "plan.json").exists():
            self.set()

    def set(self, *rules: dict[str, Any]) -> None:
        """Replaces the rules."""
        draft = self.folder / f"draft.{os.getpid()}"  # any rank may write the plan
        draft.write_text(json.dumps({**self._options, "rules": rules}))
        draft.replace(self.folder / "plan.json")

    def mutate(self, *mutations: tuple[str, str, str, str]) -> None:
        """Mutates the code of writers that start later: module, name, old text, new text."""
        self._options["mutations"] = mutations
        self.set()

    def answer_early(self) -> None:
        """Makes writers that start later reply before they have written."""
        self._options["early"] = True
        self.set()

    def gate(self, name: str = "gate") -> Gate:
        """The gate of `{"do": "wait", "gate": name}`."""
        return Gate(self.folder, name)

    def notes(self) -> list[dict[str, Any]]:
        """The operations of all writers, in order."""
        path = self.folder / "notes"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def use(self, monkeypatch: Any) -> Plan:
        """Makes checkpointers of this process start staged writers."""
        from outlast.async_checkpoint.writer import client
        from outlast.system.background_process import start_process

        def staged(module: str, *, arguments: Any) -> Any:
            if module == "outlast.async_checkpoint.writer.main":  # else it is a keeper
                module = "async_checkpoint.staged_writer"
            return start_process(module, arguments=arguments)

        monkeypatch.setenv("PYTHONPATH", TESTS)
        monkeypatch.setenv(PLAN, str(self.folder))
        monkeypatch.setattr(client, "start_process", staged)
        return self


class _Stage:
    def __init__(self) -> None:
        self.folder = Path(os.environ[PLAN])
        self._count = 0
        self._lock = threading.Lock()
        self._notes = os.open(self.folder / "notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def plan(self) -> dict[str, Any]:
        plan: dict[str, Any] = json.loads((self.folder / "plan.json").read_text())
        return plan

    def note(self, **fields: Any) -> None:
        os.write(self._notes, json.dumps({**fields, "pid": os.getpid()}).encode() + b"\n")

    def do(self, op: str, folder: str, name: str, operation: Any, *arguments: Any) -> Any:
        with self._lock:
            tidies = op in ("hide", "recycle", "remove")
            self._count += not tidies
            number = 0 if tidies else self._count
        self._obey("before", op, name, number)
        done = operation(*arguments)
        self.note(op=op, folder=folder, name=name, number=number)
        self._obey("after", op, name, number)
        return done

    def _obey(self, when: str, op: str, name: str, number: int) -> None:
        for rule in self.plan()["rules"]:
            if rule.get("when", "before") != when or rule.get("number", number) != number:
                continue
            if fnmatch.fnmatch(op, rule.get("op", "*")) and fnmatch.fnmatch(
                name, rule.get("name", "*")
            ):
                self._act(rule)

    def _act(self, rule: dict[str, Any]) -> None:
        if rule["do"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif rule["do"] == "wait":
            Gate(self.folder, rule.get("gate", "gate")).wait_in_call()
        else:
            number = getattr(errno, rule["do"])
            raise OSError(number, os.strerror(number))


class _Storage:
    """The real storage; every operation goes through the stage."""

    def __init__(self, real: Any, stage: _Stage) -> None:
        self._real = real
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._real, name)
        if name not in ("make", "put", "sync", "publish", "hide", "recycle", "remove"):
            return operation

        def staged(folder: str, *rest: Any) -> Any:
            renames = name == "publish" and hasattr(self._real, "root")
            if renames:
                self._stage.note(
                    op="durable before", folder=folder, missing=_missing(self._real.root / folder)
                )
            file = rest[0] if name == "put" else ""
            done = self._stage.do(name, folder, file, operation, folder, *rest)
            if renames:
                self._stage.note(
                    op="durable after", folder=folder, missing=_missing(self._real.root, deep=False)
                )
            return done

        return staged

    def create(self, folder: str, name: str, size_bytes: int) -> _File:
        made = self._stage.do("create", folder, name, self._real.create, folder, name, size_bytes)
        return _File(made, self._stage, folder, name)


class _File:
    def __init__(self, real: Any, stage: _Stage, folder: str, name: str) -> None:
        self._real = real
        self._stage = stage
        self._folder, self._name = folder, name

    def write_at(self, offset: int, data: memoryview) -> None:
        self._stage.do("write_at", self._folder, self._name, self._real.write_at, offset, data)

    def finish(self) -> None:
        self._stage.do("finish", self._folder, self._name, self._real.finish)

    def abandon(self) -> None:
        self._real.abandon()


_synced: dict[int, tuple[int, int]] = {}  # by inode: its state when it was made durable
_real_fsync = os.fsync


def _fsync(descriptor: int) -> None:
    _real_fsync(descriptor)
    found = os.fstat(descriptor)
    _synced[found.st_ino] = (found.st_mtime_ns, found.st_size)


def _missing(folder: Path, *, deep: bool = True) -> list[str]:
    """The files that a power failure would lose."""
    paths = [folder, *(folder.iterdir() if deep else ())]
    return [p.name for p in paths if _synced.get(p.stat().st_ino) != _as_it_is(p)]


def _as_it_is(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def _set_up() -> None:
    from outlast.async_checkpoint.writer import main
    from outlast.async_checkpoint.writer.write_files import checksums_of

    stage = _Stage()
    plan = stage.plan()
    if plan.get("mutations"):
        import importlib

        import pytest

        from inprocess.mutations import mutate

        for module, name, old, new in plan["mutations"]:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            mutate(pytest.MonkeyPatch(), found, old, new)
    real_open, real_write = main.open_storage, main.write_files

    def early(
        storage: Any, folder: str, memory: Any, files: Any, small: Any, **options: Any
    ) -> Any:
        threading.Thread(
            target=real_write, args=(storage, folder, memory, files, small), kwargs=options
        ).start()
        parts = [(name, memory[at : at + size]) for name, at, size in files]
        return checksums_of([*parts, *((name, memoryview(small[name])) for name in small)])

    os.fsync = _fsync
    main.open_storage = lambda url: _Storage(real_open(url), stage)  # type: ignore[assignment, return-value]
    if plan.get("early"):
        main.write_files = early  # type: ignore[assignment]


if __name__ == "__main__":
    _set_up()
    from outlast.async_checkpoint.writer.main import main

    main()
