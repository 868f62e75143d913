"""`Compose`: that of `outlast.inprocess`."""

from outlast.inprocess.compose import Compose

__all__ = ["Compose"]
