"""A fast run and a fast end of a process that has imported torch.

At its end, Python searches all objects for garbage, several times. Each search visits the 200,000
to 300,000 objects that torch and a script's other packages have created: 0.5 to 1 s of CPU time for
each process of a job, all at the same moment. It finds nothing but objects in reference cycles, and
their memory is about to be released anyway.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import sys

_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def freeze_imports() -> None:
    """Takes what a script has imported out of all later garbage collections, in which a restart
    would wait for a pass over a million objects. What the script has made before is freed as ever,
    except for reference cycles. Not in a notebook, which makes more before.
    """
    is_script = hasattr(sys.modules["__main__"], "__file__") and not hasattr(sys, "ps1")
    if is_script and gc.get_freeze_count() == 0:
        gc.freeze()


def exit_fast() -> None:
    """Let this process end without these searches. Exit handlers run, and objects outside of cycles
    are released, as always; a file in a cycle, which the search would close, is flushed.
    """
    atexit.unregister(_hide_from_the_search)
    atexit.register(_hide_from_the_search)


def _hide_from_the_search() -> None:
    gc.unfreeze()  # what was frozen before is not among the objects below
    for each in gc.get_objects():
        # By its type: `isinstance` asks proxies, whose object may be gone, for their class.
        if type(each).__module__ == "nanobind":
            return  # a library made with it, as triton is, prints what the search has not freed
        if issubclass(type(each), _BUFFERED) and not each.closed:
            with contextlib.suppress(OSError, ValueError):  # its disk is full, its reader is gone
                each.flush()
    gc.freeze()
