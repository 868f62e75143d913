"""How all workers are brought to their end, and then what they left: ask, wait, kill."""

from __future__ import annotations

import signal
from collections.abc import Callable

from outlast.launch.agent.resources import Site
from outlast.launch.event_loop import Timer
from outlast.launch.processes.reaping import Sweep

__all__ = ["Ending"]


class Ending:
    """Ends workers, then their helpers; knows of time, and nothing of what led to it.

    Args:
        site: the workers, the loop, and the console to say it on.
        swept: called when neither workers nor helpers are left.
    """

    def __init__(self, site: Site, swept: Callable[[], None]) -> None:
        self._site = site
        self._swept = swept
        self._grace: Timer | None = None
        self._sweep: Sweep | None = None
        self._hurried = False

    def ask(self, number: signal.Signals) -> None:
        """Send the workers a signal; those that are left after the grace time are killed."""
        self._site.crew.send(number)
        self._cancel()
        self._grace = self._site.loop.call_later(self._site.job.grace_s, self._kill)

    def hurry(self) -> None:
        """Wait for nothing from now on."""
        self._hurried = True
        self._kill()
        if self._sweep is not None:
            self._sweep.hurry()

    def sweep(self, patient: bool) -> None:
        """End the helpers, now that no worker is left; nothing new if that is under way."""
        self._cancel()
        if self._sweep is not None:
            return
        if self._hurried:
            steps = Sweep.at_once()
        else:
            steps = Sweep.patient(self._site.job.grace_s) if patient else Sweep.brisk()
        self._sweep = Sweep(self._site.loop, self._site.keep, steps, self._done)
        self._sweep.start()

    def check(self) -> None:
        """To be called when children were reaped."""
        if self._sweep is not None:
            self._sweep.check()

    def _cancel(self) -> None:
        if self._grace is not None:
            self._grace.cancel()

    def _kill(self) -> None:
        if self._site.crew:
            left = ", ".join(str(worker.place.local_rank) for worker in self._site.crew)
            self._site.console.say(f"killed, not having ended: rank {left}")
            self._site.crew.send(signal.SIGKILL)

    def _done(self, left: list[int]) -> None:
        self._sweep = None
        if left:
            self._site.console.say(f"cannot be killed, left behind: {left}")
        self._swept()
