"""Programs for `start_process`: `python -m system.programs` does as its argument says."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from outlast.system.background_process import settle

if __name__ == "__main__":
    how = sys.argv[3]
    channel = settle(nice=7, ends_with_parent=how != "outlives")
    own = psutil.Process()
    facts = {
        "arguments": sys.argv[1:],
        "nice": os.nice(0),
        "io": [int(own.ionice().ioclass), own.ionice().value],
        "session": os.getsid(0) == os.getpid(),
        "interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "stdin": os.readlink("/proc/self/fd/0"),
        "inheritable": os.get_inheritable(channel.fileno()),
        "torch": "torch" in sys.modules,
    }
    channel.send(json.dumps(facts).encode())
    if how == "stubborn":
        signal.pause()
    elif how == "exit":
        sys.exit(3)
    try:
        channel.receive()
    except EOFError:
        if how == "outlives":
            time.sleep(0.1)  # longer than its parent, however little
            Path(sys.argv[2]).write_text("wrote after the end")
