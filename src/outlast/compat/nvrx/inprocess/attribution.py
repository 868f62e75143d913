"""The kinds of interruption: those of `outlast.inprocess.attribution`."""

from outlast.inprocess.attribution import Interruption, InterruptionRecord

__all__ = ["Interruption", "InterruptionRecord"]
