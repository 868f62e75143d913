"""The process of `zygote.py`: imports, forks on request, and makes children what they are to be.

python zygote_process.py SOCKET MODULE...
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import io
import multiprocessing.process
import os
import runpy
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import forked_workers
import namespaces

BLANK = "0" * 60_000
"""A placeholder in the zygote's environment, which makes room for that of any child."""


def _serve(channel: socket.socket) -> forked_workers.Task | None:
    """The zygote's side, until the test closes the channel. In a child, returns its request."""
    for name in sys.argv[2:]:
        module = importlib.import_module(name)
        if name.startswith("outlast"):
            for public in getattr(module, "__all__", ()):
                getattr(module, public)  # some are imported on access
    gc.collect()
    # A library made with nanobind, as the triton of some builds of torch is, prints at the end of a
    # process what no search has freed, which in a fresh interpreter is nothing.
    counts_the_rest = any(type(each).__module__ == "nanobind" for each in gc.get_objects())
    gc.freeze()  # so that a child's collections do not visit, and copy, all of torch

    while (task := forked_workers.receive(channel)) is not None:
        request, descriptors = task
        if "reap" in request:
            channel.sendall(f"{os.waitpid(request['reap'], 0)[1]}\n".encode())
        elif os.fork() == 0:
            if counts_the_rest:
                atexit.register(gc.unfreeze)
            os.setsid()  # before the reply: the test may kill the session as soon as it knows it
            channel.sendall(f"{os.getpid()}\n".encode())
            channel.close()
            return task
        else:
            for descriptor in descriptors:
                os.close(descriptor)
    return None


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Makes a child equivalent to a fresh interpreter."""
    for number, descriptor in enumerate(descriptors, start=3 - len(descriptors)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    env = request["env"]
    os.environ.clear()
    os.environ.update(env)
    _show_in_proc(env)
    paths = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    os.chdir(request["cwd"])
    # State that these modules keep from their import or first use.
    tempfile.tempdir = None
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]
    _shorten_the_end()
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        unbuffered = env.get("PYTHONUNBUFFERED") or request.get("unbuffered")
        stream.reconfigure(write_through=bool(unbuffered))


def _shorten_the_end() -> None:
    """Leaves out what would take more CPU time than all else that most ranks of tests do: to write
    to every page that the process shares with the zygote, in order to release what is on it.

    Exit handlers run, and what outlast, torch.distributed and the script itself have is released in
    the order of Python. The contents of the other modules are not, and neither are the static
    objects of torch's libraries, which come after the end of Python.
    """
    _kept.extend(name for name in sys.modules if not name.startswith(_RELEASED))
    libc = ctypes.CDLL(None)
    # `exit` calls these two in reverse order, before the functions of libraries loaded earlier.
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)


_kept: list[str] = []
_RELEASED = ("__main__", "builtins", "sys", "outlast", "torch.distributed")


@atexit.register  # before any import of the zygote, so that it runs after their handlers
def _keep_imports() -> None:
    for name in _kept:
        module = sys.modules.pop(name, None)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))


def _run(command: list[str]) -> None:
    """Runs `script args...` or `-m module args...`, as the interpreter does."""
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path[0] = str(Path.cwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")


def _ends_well(command: list[str]) -> bool:
    """Runs the program; an exception is shown as the interpreter shows it. Nothing refers to it
    afterwards, so that what the program has is released at the end.
    """
    try:
        _run(command)
    except Exception as error:  # noqa: BLE001 - any exception of the program
        # The interpreter has no frames of this file at the top of the stack.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return False
    return True


def _show_in_proc(env: dict[str, str]) -> None:
    """Writes the environment to the memory that `/proc/PID/environ` shows: that of the process at
    its start, which changes to `os.environ` do not affect. Launchers find their workers by it.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start, env_end: see proc_pid_stat(5)
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    if len(block) > end - start:
        raise ValueError(f"an environment of {len(block)} bytes does not fit into {end - start}")
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    task = _serve(socket.socket(fileno=int(sys.argv[1])))
    request: dict[str, Any] = {}
    while task is not None:
        request, _ = task
        if request.get("host"):
            namespaces.enter(request["host"])
        _become(*task)
        task = forked_workers.serve() if request.get("workers") else None
    if request and not _ends_well(request["command"]):
        sys.exit(1)
