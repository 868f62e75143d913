"""The end of a child process that the function has forked, and that leaves the function.

Everything below in its stack is its parent's: the place in the job, the connections, the monitor
process. So nothing of that is unwound or told; the process ends here, with the exit code that it
would have had as a program.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

__all__ = ["end_child"]

log = logging.getLogger("outlast.inprocess")


def end_child(error: BaseException | None) -> NoReturn:
    """Ends this process. `error` is what it left the function with; `None` if it returned."""
    code = 1
    try:
        if error is None:
            log.warning("process %d was forked in the function and returned from it", os.getpid())
            code = 0
        elif isinstance(error, SystemExit):
            code = _exit_code(error)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:
        os._exit(code)


def _exit_code(error: SystemExit) -> int:
    """As the interpreter has it: a number, nothing for 0, or a message for 1."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1
