"""The hook that runs on a rank that leaves with an exception."""

from outlast.inprocess.ending import Terminate

__all__ = ["Terminate"]
