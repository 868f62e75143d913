"""A rank that leaves hands its state over to its successor, which may be on another host.

The rank serves its frozen state by TCP, after the handshake of `peer_copies.transfer`; the store of
the job says where. The successor fetches it before its first restore, compares the checksums, and
offers it there as if it had made the step itself: shards, generators and all that belongs to one
rank come along. The rank that leaves ends once the successor has restored, or after a time limit.
If it dies before, the fetch fails, and the restore goes on as after a fault. A successor that dies
has a replacement, which may fetch again.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import socket
import threading
from collections.abc import Mapping

import msgspec
import torch

from outlast.async_checkpoint.connections import Connection, ConnectionRefused, token_of
from outlast.async_checkpoint.environment import own_address
from outlast.coordination.ops import run
from outlast.coordination.stores.store import KeyTimeout
from outlast.elastic.job.encoding import load_shapes
from outlast.elastic.job.live.frozen import Frozen, Held
from outlast.elastic.job.live.own_state import Record
from outlast.elastic.job.live.transfer import checksum_of, gathered, parcels_of, scatter
from outlast.elastic.tensors import bytes_of, memory_of
from outlast.errors import StoreError
from outlast.inprocess.running_call import RunningCall
from outlast.system.error_text import describe
from outlast.system.sockets import accepted, listen, stop
from outlast.system.units import size_text

log = logging.getLogger("outlast.elastic")

LIMIT_S = 300.0
"""How long a rank that leaves waits for its successor."""
_LOOPBACK = "127.0.0.1"


class _Address(msgspec.Struct, frozen=True):
    """The value of `RunningCall.handover_key`."""

    member: int
    host: str
    address: str
    port: int
    nonce: str
    url: str  # the folder of the job

    @property
    def token(self) -> str:
        return token_of(self.nonce)

    @property
    def done(self) -> str:
        return f"handed-over/{self.member}"


class Handover:
    """The end of the rank that leaves. Serves from its creation until `wait` returns."""

    def __init__(
        self, call: RunningCall, url: str, frozen: Frozen, records: Mapping[Record, bytes]
    ) -> None:
        self._call, self._frozen, self._records = call, frozen, records
        address = own_address() if call.launch.host_id else _LOOPBACK
        self._listener = listen(address)
        port, nonce = self._listener.getsockname()[1], secrets.token_hex(32)
        host = socket.gethostname()
        self._address = _Address(call.member, host, address, port, nonce, url)
        threading.Thread(target=self._serve, name="outlast-handover", daemon=True).start()
        link = call.membership.link
        run(link.put(call.handover_key, msgspec.json.encode(self._address)))

    def wait(self) -> None:
        """Waits until the successor has restored the state, or for at most `LIMIT_S`."""
        link, rank = self._call.membership.link, self._call.rank
        try:
            run(link.wait_for(self._address.done, LIMIT_S))
        except KeyTimeout:
            log.warning("rank %d leaves; nobody has taken its state in %g s", rank, LIMIT_S)
            run(link.delete(self._call.handover_key))
        except StoreError as e:
            log.warning("rank %d leaves; whether its state was taken is unknown: %s", rank, e)
        finally:
            stop(self._listener)

    def _serve(self) -> None:
        for sock in accepted(self._listener):
            with sock:
                try:
                    self._send(Connection.accept(sock, self._address.token))
                except (OSError, EOFError, ValueError, ConnectionRefused) as e:
                    log.debug("a fetch of the state failed: %s", describe(e))

    def _send(self, connection: Connection) -> None:
        frozen, header = self._frozen, self._frozen.header()
        records = [(dataclasses.asdict(r), len(own)) for r, own in self._records.items()]
        held = msgspec.to_builtins(frozen.held)
        connection.send_frame({"held": held, "header": len(header), "records": records})
        for each in (header, *self._records.values()):
            connection.send(memoryview(each))
        views, checksums = [bytes_of(leaf) for leaf in frozen.leaves], list[int]()
        for parcel in parcels_of(load_shapes(header)):
            content = gathered(views, parcel).cpu()
            checksums.append(checksum_of(content))
            connection.send(memory_of(content))
        changed = frozen.versions.changed
        connection.send_frame({"checksums": checksums, "changed": changed})


class Inherited:
    """What a successor has fetched: the state, and the own states that its predecessor had noted,
    as those in `own_state`.
    """

    def __init__(self, call: RunningCall, address: _Address) -> None:
        self._call, self._address = call, address
        connection = Connection.open(address.address, address.port, address.token)
        try:
            found = connection.receive_frame()
            header = _received(connection, found["header"])
            self.records: dict[Record, bytes] = {
                Record(**record): _received(connection, size) for record, size in found["records"]
            }
            shapes = load_shapes(header)
            leaves = [torch.empty(shape, dtype=getattr(torch, name)) for name, shape in shapes]
            views, checksums = [bytes_of(leaf) for leaf in leaves], list[int]()
            for parcel in parcels_of(shapes):
                into = gathered(views, parcel)
                connection.receive_into(memory_of(into))
                scatter(views, parcel, into)
                checksums.append(checksum_of(into))
            if connection.receive_frame() != {"checksums": checksums, "changed": False}:
                raise ValueError("it arrived damaged, or was written to meanwhile")
        finally:
            connection.close()
        self.frozen = Frozen.received(msgspec.convert(found["held"], Held), header, leaves)
        self.bytes = sum(leaf.nbytes for leaf in leaves)
        log.info(
            "the state after step %d comes from host %s, whose rank leaves: %s",
            self.frozen.held.record.step,
            address.host,
            size_text(self.bytes),
        )

    def release(self) -> None:
        """All ranks have restored a state: the predecessor may end."""
        link = self._call.membership.link
        run(link.delete(self._call.handover_key))
        run(link.put(self._address.done, b"1"))


def fetch(call: RunningCall, url: str) -> Inherited | None:
    """The state that a rank which has left keeps for this process; `None` if none does, or if it
    cannot be had: the log says why.
    """
    data = run(call.membership.link.read(call.handover_key))
    if data is None:
        return None
    address = msgspec.json.decode(data, type=_Address)
    if address.url != url:
        return None
    try:
        return Inherited(call, address)
    except (OSError, EOFError, ValueError, KeyError, TypeError, ConnectionRefused) as e:
        text = "the state of the rank that leaves cannot be fetched from host %s: %s"
        log.warning(text, address.host, describe(e))
        return None


def _received(connection: Connection, size: int) -> bytes:
    data = bytearray(size)
    connection.receive_into(memoryview(data))
    return bytes(data)
