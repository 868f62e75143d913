"""The stores: those of `outlast.inprocess.store`."""

from outlast.inprocess.store import FileStore, PrefixStore, StoreMixin, TCPStore

__all__ = ["FileStore", "PrefixStore", "StoreMixin", "TCPStore"]
