"""A standby process: imports what a worker needs, waits, and becomes one; run by path.

    python -u standby_process.py SETTINGS

SETTINGS is a JSON object, see `Settings`. One packet each, in JSON, on the socket to the launcher:

    to the launcher     {"ready": true, "ends_at": 12}: it waits. `ends_at` is the line of the
                        script behind which it imported nothing; 0 if it imported everything.
                        {"ready": false, "limit": 2, "reason": "..."}: it ends, because import
                        number 2 should be left to the script. The next standby stops before it.
    from the launcher   {"environment": {...}}, with stdout and stderr as descriptors: it becomes a
                        worker. The end of the stream: it ends.

Until it becomes a worker, its output goes to files in memory. What the imports have printed is
written to the worker's output, as if they had been executed then.

An import that reads a variable such as `RANK`, which a standby does not have, would give the module
the value for no rank. Such an import is left to the script, and so is every later one: the order of
imports may matter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import io
import json
import os
import re
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PACKET = 128 * 1024
"""No message is longer: the launcher does not send one that does not fit."""

_ENVIRONMENT = "outlast.launch.environment"
_CHAOS = (
    "outlast.chaos.bootstrap",
    "outlast.inprocess.call_wrapper",
    "outlast.async_checkpoint.observers",
)
_LATER = ("outlast.inprocess", "outlast.async_checkpoint", "outlast.elastic")
"""Packages that import some of their modules on use: a standby imports all that are exported."""
_READS = "reads %s when it is imported: read it in a function, or move the import to the end"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a standby is told at its start."""

    descriptor: int  # the socket to the launcher
    target: str  # the path of the script, or the name of the module
    arguments: list[str]  # the rest of `sys.argv`
    as_module: bool
    chaos: bool
    limit: int  # import no more than this number of modules of the script


class ImportLeft(Exception):
    """The script itself should import this module: `limit` is its number among the imports."""

    def __init__(self, limit: int, reason: str) -> None:
        super().__init__(reason)
        self.limit = limit


def main(settings: Settings) -> None:
    """Import, wait, and run the program."""
    with socket.socket(fileno=settings.descriptor) as channel:
        channel.set_inheritable(False)
        captured = [_capture(number) for number in (1, 2)]
        # This process was started by the path of this file, so its folder is in sys.path. The
        # imports must find what they would find in a worker.
        if not getattr(sys.flags, "safe_path", False):
            folder = os.path.dirname(os.path.realpath(settings.target))
            sys.path[0] = os.getcwd() if settings.as_module else folder
        try:
            answer: dict[str, Any] = {"ready": True, "ends_at": prepare(settings)}
        except ImportLeft as left:
            answer = {"ready": False, "limit": left.limit, "reason": str(left)}
        importlib.import_module("outlast.system.main_program").exit_fast()
        channel.sendall(json.dumps(answer).encode())
        if not answer["ready"]:
            return
        data, descriptors, _, _ = socket.recv_fds(channel, PACKET, 2)
    if not data:
        return  # the job needs it no longer
    for number, file, descriptor in zip((1, 2), captured, descriptors, strict=True):
        _release(number, file, descriptor)
    environment = importlib.import_module(_ENVIRONMENT)
    environment.set_variables(json.loads(data)["environment"])
    environment.tell_frameworks_the_rank()
    run(settings)


def run(settings: Settings) -> None:
    """Run the program as `__main__`."""
    target, arguments = settings.target, settings.arguments
    if settings.chaos:
        module = ["-m"] if settings.as_module else []
        importlib.import_module(_CHAOS[0]).main([*module, target, *arguments])
        return
    programs = importlib.import_module("outlast.system.main_program")
    try:
        programs.run_main(target, arguments, as_module=settings.as_module)
    except programs.ScriptUnreadable as error:
        print(f"{sys.executable}: {error}", file=sys.stderr)
        sys.exit(2)


def prepare(settings: Settings) -> int:
    """Import what the program imports first; returns the line at which this ends, or 0. Raises
    `ImportLeft` if the result would not be that of a worker.
    """
    imports = importlib.import_module("outlast.launch.workers.script_imports")
    if settings.chaos:
        for name in _CHAOS:
            importlib.import_module(name)
    number = 0
    environment = importlib.import_module(_ENVIRONMENT)
    with environment.recorded_reads() as reads:
        try:
            source, package = _source(settings)
            found = imports.beginning(source)
        except (OSError, ImportError, SyntaxError, ValueError):
            return 0  # the worker will report it
        frameworks = imports.framework_imports(source, found.steps)
        frameworks = [step for step in frameworks if _is_installed(step.name.partition(".")[0])]
        for number, step in enumerate([*found.steps, *frameworks][: settings.limit]):
            if isinstance(step, imports.SetVariable):
                environment.set_variables({step.name: step.value}, keep=step.default)
                continue
            try:
                _import(step, package)
            except Exception as error:
                if not step.optional:
                    why = f"{type(error).__name__}: {error}"
                    raise ImportLeft(number, f"`{step}` fails there ({why})") from error
            if reads:
                raise ImportLeft(number, f"`{step}` {_READS % reads[0]}")
        if settings.limit < len(found.steps):
            return 0
        if found.ends_at == 0:
            _import_later(source, found.changes_environment)
            if reads:
                raise ImportLeft(number, f"a module {_READS % reads[0]}")
    gc.collect()
    return int(found.ends_at)


def _import(step: Any, package: str) -> None:
    """Import as the statement in the script does; submodules in `names` too."""
    namespace = {"__name__": "__main__", "__package__": package or None}
    __import__(step.name, namespace, None, step.names, step.level)


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    folders = Path(str(spec.origin if spec is not None else "")).parts
    return "site-packages" in folders or "dist-packages" in folders


def _import_later(source: bytes | str, changes_environment: bool) -> None:
    """Import what would be imported on use."""
    text = source if isinstance(source, str) else source.decode(errors="replace")
    for name in re.findall(r"\boutlast\.(\w+)", text):
        getattr(sys.modules.get("outlast"), name, None)  # such as `outlast.Job`
    for name in _LATER:
        module = sys.modules.get(name)
        for public in getattr(module, "__all__", ()):
            getattr(module, public)
    # The first step of an optimizer imports it, which takes longer than all of a restart. It reads
    # variables that some scripts set after the import of torch.
    if "torch" in sys.modules and not changes_environment:
        with contextlib.suppress(ImportError):
            importlib.import_module("torch._dynamo")
        with contextlib.suppress(Exception):  # that of the worker is told
            _use_first(sys.modules["torch"])


def _use_first(torch: Any) -> None:
    """Use what takes longer the first time, and what no variable and no device changes."""
    "localhost".encode("idna")  # as each connection does
    content = io.BytesIO()
    torch.save({"tensor": torch.ones(1, device="cpu"), "values": [1, 0.5, "text", None]}, content)
    content.seek(0)
    torch.load(content, weights_only=True)


def _source(settings: Settings) -> tuple[bytes | str, str]:
    """The source of the program, and the name of its package. Sets `sys.argv`, which packages may
    read when they are imported.
    """
    sys.argv = ["-m" if settings.as_module else settings.target, *settings.arguments]
    if not settings.as_module:
        return Path(settings.target).read_bytes(), ""
    name = settings.target
    spec = importlib.util.find_spec(name)  # imports the packages that contain it, as `-m` does
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    source = getattr(spec.loader, "get_source", None) if spec is not None else None
    text = source(spec.name) if source is not None and spec is not None else None
    if spec is None or text is None:
        raise ImportError(f"no source of {name}")
    sys.argv[0] = str(spec.origin)
    return text, spec.name.rpartition(".")[0]


def _capture(number: int) -> int:
    file = os.memfd_create(f"outlast-standby-{number}", os.MFD_CLOEXEC)
    os.dup2(file, number)
    return file


def _release(number: int, file: int, descriptor: int) -> None:
    """Point a standard stream at the worker's output, after what was captured."""
    stream: ModuleType | Any = sys.stdout if number == 1 else sys.stderr
    stream.flush()
    captured = os.pread(file, os.fstat(file).st_size, 0)
    os.close(file)
    os.dup2(descriptor, number)
    os.close(descriptor)
    with os.fdopen(os.dup(number), "wb") as output:
        output.write(captured)


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
