"""Connections between ranks on different hosts, for other packages."""

from __future__ import annotations

from outlast.async_checkpoint.peer_copies.arrangement import token_of as token_of
from outlast.async_checkpoint.peer_copies.transfer import Connection as Connection
from outlast.async_checkpoint.peer_copies.transfer import ConnectionRefused as ConnectionRefused
