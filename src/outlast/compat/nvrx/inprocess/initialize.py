"""Initialize policies: those of `outlast.inprocess.initialize`."""

from outlast.inprocess.initialize import Initialize, RetryController

__all__ = ["Initialize", "RetryController"]
