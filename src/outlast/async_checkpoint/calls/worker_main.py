"""The program of a persistent worker: receives calls on a channel and reports their outcomes.

It inherits only the module path and the arguments of its parent. A call of a function that is
defined in the parent's program needs that program here: it is then imported under another name, so
that the code under `if __name__ == "__main__":` does not run.
"""

from __future__ import annotations

import json
import os
import pickle
import runpy
import sys
import types
from collections.abc import Mapping
from typing import IO, Any

from outlast.async_checkpoint.calls import runners
from outlast.async_checkpoint.calls.runners import Outcome, run_here
from outlast.system.background_process import settle
from outlast.system.fork import flush_streams


def main() -> None:
    """Runs calls until the parent closes the channel or ends."""
    channel = settle(nice=int(sys.argv[3]))
    try:
        surroundings = json.loads(channel.receive()[0])
        sys.path[:], sys.argv[:] = surroundings["path"], surroundings["argv"]
        while True:
            _, (descriptor,) = channel.receive()
            outcome = _run(descriptor, surroundings)
            flush_streams()
            channel.send(outcome.encode())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # threads that a call left behind must not delay the exit


def _run(descriptor: int, surroundings: Mapping[str, Any]) -> Outcome:
    try:
        with open(descriptor, "rb") as file:
            file.seek(0)  # the position is shared with the descriptor that was written to
            fn, args, kwargs = _Unpickler(file, surroundings).load()
    except BaseException as e:  # noqa: BLE001 - reported to the parent process
        return Outcome.of(e, "the call cannot be unpickled in the worker: ")
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # the other cores are for training
    return run_here(fn, args, kwargs)


class _Unpickler(pickle.Unpickler):
    """Imports the parent's program when a pickle, which comes from the parent, refers to it."""

    def __init__(self, file: IO[bytes], surroundings: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._surroundings = surroundings

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__":
            _import_main(self._surroundings)
        return super().find_class(module, name)


def _import_main(surroundings: Mapping[str, Any]) -> None:
    if "__mp_main__" in sys.modules:
        return
    # The name that multiprocessing uses for this: programs may check for it.
    module = types.ModuleType("__mp_main__")
    runners.importing_main = True
    try:
        if surroundings["main_name"] is not None:
            content = runpy.run_module(surroundings["main_name"], run_name="__mp_main__")
        elif surroundings["main_file"] is not None:
            content = runpy.run_path(surroundings["main_file"], run_name="__mp_main__")
        else:
            return  # the parent's program is not in a file: nothing to import
    finally:
        runners.importing_main = False
    module.__dict__.update(content)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


if __name__ == "__main__":
    main()
