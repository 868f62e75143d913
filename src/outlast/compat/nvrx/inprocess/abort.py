"""Abort policies: those of `outlast.inprocess.abort`."""

from outlast.inprocess.abort import Abort, AbortTorchDistributed, AbortTransformerEngine

__all__ = ["Abort", "AbortTorchDistributed", "AbortTransformerEngine"]
