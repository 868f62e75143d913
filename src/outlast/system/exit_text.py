"""How a process ended, in words."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """`SIGKILL`, `SIGRTMIN+3`, or `signal 32` where the system has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        if signal.SIGRTMIN < number < signal.SIGRTMAX:
            return f"SIGRTMIN+{number - signal.SIGRTMIN}"
        return f"signal {number}"


def exit_text(code: int) -> str:
    """`exited with code 3`, or `was killed by SIGKILL` for a code below 0."""
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
