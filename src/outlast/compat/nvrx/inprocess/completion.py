"""The hook that runs when all ranks have completed."""

from outlast.inprocess.ending import Completion

__all__ = ["Completion"]
