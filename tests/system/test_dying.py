"""A process that is being killed is detected as dying; one whose thread ends is not."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from outlast.system.processes import is_dying, open_thread

HOLDER = """
import sys, threading, time
held = bytearray(300_000_000)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
other = threading.Thread(target=sys.stdin.readline)
other.start()
print(*[t.native_id for t in threading.enumerate()[1:]], flush=True)
time.sleep(600)
"""


def readable(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    assert poll.poll(60_000)
    os.close(descriptor)


def test_threads_tell_of_a_kill_and_of_an_end_in_good_order() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        sleeper, reader = (open_thread(int(tid)) for tid in holder.stdout.readline().split())
        if sleeper is None or reader is None:
            holder.kill()
            pytest.skip("this system has no descriptors for threads")
        holder.stdin.write("end\n")
        holder.stdin.flush()
        readable(reader)
        assert not is_dying(holder.pid)
        holder.send_signal(signal.SIGKILL)
        readable(sleeper)
        assert is_dying(holder.pid)
    assert is_dying(holder.pid)  # it is gone


def test_a_thread_that_does_not_exist_has_no_descriptor() -> None:
    assert open_thread(1 << 30) is None  # above the greatest number that Linux gives
    assert not is_dying(os.getpid())
