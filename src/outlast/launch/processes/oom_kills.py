"""Whether the kernel's out-of-memory killer has killed a process: its counter of this cgroup."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_PLACES = {"": (".", "memory.events"), "memory": ("memory", "memory.oom_control")}
"""By the controller in `/proc/self/cgroup`: the folder of the hierarchy, and the file with the
counter. Version 2 names no controller.
"""


class OomKills:
    """Counts the kills in the cgroup of this process, where its children live too: a container, a
    job of a scheduler, a login. Without such a counter there never seem to be any.
    """

    def __init__(self, own: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> None:
        self._file = _counter_file(own, root)
        self._seen = self._count()

    def any_new(self) -> bool:
        """Whether there was one that no call before has returned."""
        new = self._count() > self._seen
        self._seen += new
        return new

    def _count(self) -> int:
        if self._file is None:
            return 0
        try:
            fields = [line.split() for line in self._file.read_text().splitlines()]
        except OSError:  # the cgroup is gone
            return 0
        return next((int(value) for name, value in fields if name == "oom_kill"), 0)


def _counter_file(own: Path, root: Path) -> Path | None:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controller, group = line.split(":", 2)
        if controller in _PLACES:
            hierarchy, name = _PLACES[controller]
            # In a container, the path may be that on the host: then the container's is the root.
            for folder in (group.strip("/"), "."):
                if (file := root / hierarchy / folder / name).is_file():
                    return file
    return None
