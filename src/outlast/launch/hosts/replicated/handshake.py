"""How two agents prove to each other that they know the secret of the job. Pure: no socket.

Without a secret, each side sends `OPEN`, and frames follow. With one:

    both       SECRET, 32 random bytes
    dialer     its proof: HMAC of "dialer" with the key of this connection
    listener   its proof: HMAC of "listener" with that key; zeros if the dialer's was wrong

The key of the connection is an HMAC, with the secret, of the random bytes of both sides. Every
frame after that has a tag: an HMAC, with that key, of its sender, its number and its contents.

* *Replay.* A recorded proof is for other random bytes: each side has chosen some of them anew.
* *Reflection.* A side that gets its own random bytes and its own proof back refuses the proof,
  which is that of the other role.
* *Relay.* Someone in the middle can pass on the proofs of two honest sides. They do not have the
  key, so they can only pass on the frames too, unchanged and in order, or end the connection.
* *Another run with the same secret.* `Hello` has the run id, and is a frame with a tag.
* *Guessing.* The listener answers a right proof only, so who dials it learns nothing to try
  guesses on. Who listens where a host of the job dials gets a proof: the secret must be long.
* *Memory.* Until the proof is right, a side keeps at most `FIRST_BYTES` (72) of the other.

What this does not do: frames are not encrypted, so who sees the network reads them.
"""

from __future__ import annotations

import hmac
import secrets

from outlast.launch.config.secret import Secret

OPEN, SECRET = b"outlast\n", b"outlast+"
_NONCE_BYTES = _PROOF_BYTES = 32
TAG_BYTES = 16
FIRST_BYTES = len(SECRET) + _NONCE_BYTES + _PROOF_BYTES
"""No side sends more before it has proved that it knows the secret."""
_SET_BY = "(OUTLAST_TOKEN or --token-file)"


class NotProved(Exception):
    """The other side does not have the same secret, or only one of the two has any."""


class Handshake:
    """One side of it."""

    def __init__(self, secret: Secret | None, *, dials: bool) -> None:
        self._secret, self._dials = secret, dials
        self._nonce = b"" if secret is None else secrets.token_bytes(_NONCE_BYTES)
        self._key = b""
        self._sent = self._received = 0
        # what this side sends first
        self.to_send = (OPEN if secret is None else SECRET) + self._nonce
        self.wants = len(OPEN)  # how many bytes the next call of `receive` needs; 0 once it is over

    def may_go_on(self, received: bytes) -> bool:
        """Whether an agent may have sent these bytes, which `receive` has not taken."""
        began = self.wants != len(OPEN)
        return began or any(kind.startswith(received[: len(kind)]) for kind in (OPEN, SECRET))

    @property
    def over(self) -> bool:
        return not self.wants

    def receive(self, data: bytes) -> bytes:
        """Takes the `wants` bytes that came next, after `may_go_on`; returns what to send now. A
        `NotProved` if it has not the same secret; its first argument is the reason, its second what
        to send before the end.
        """
        assert len(data) == self.wants
        if len(data) == len(OPEN):
            return self._kind(data)
        if not self._key:
            return self._begin(data)
        self._check(data)
        self.wants = 0
        return b"" if self._dials else self._proof("listener")

    def seal(self, frame: bytes) -> bytes:
        """The tag of the next frame that this side sends; empty without a secret."""
        self._sent += 1
        return self._tag("dialer" if self._dials else "listener", self._sent, frame)

    def is_genuine(self, frame: bytes, tag: bytes) -> bool:
        """Whether `tag` is that of the next frame of the other side."""
        self._received += 1
        expected = self._tag("listener" if self._dials else "dialer", self._received, frame)
        return hmac.compare_digest(expected, tag)

    @property
    def tag_bytes(self) -> int:
        return TAG_BYTES if self._key else 0

    def _kind(self, data: bytes) -> bytes:
        if data == OPEN and self._secret is not None:
            raise NotProved(f"it uses no secret {_SET_BY}, and this host does", b"")
        if data == SECRET and self._secret is None:
            raise NotProved(
                f"it uses a secret, and this host has none: set the same one {_SET_BY}", b""
            )
        self.wants = 0 if self._secret is None else _NONCE_BYTES
        return b""

    def _begin(self, theirs: bytes) -> bytes:
        assert self._secret is not None
        nonces = (self._nonce, theirs) if self._dials else (theirs, self._nonce)
        self._key = self._secret.derive("connection of hosts", *nonces)
        self.wants = _PROOF_BYTES
        return self._proof("dialer") if self._dials else b""

    def _check(self, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof("listener" if self._dials else "dialer")):
            raise NotProved(
                f"its secret {_SET_BY} differs from that of this host: all hosts of a job need "
                "the same",
                b"" if self._dials else bytes(_PROOF_BYTES),
            )

    def _proof(self, role: str) -> bytes:
        return hmac.digest(self._key, role.encode(), "sha256")

    def _tag(self, role: str, number: int, frame: bytes) -> bytes:
        if not self._key:
            return b""
        # Another message than any proof, which has no number.
        message = role.encode() + number.to_bytes(8, "big") + frame
        return hmac.digest(self._key, message, "sha256")[:TAG_BYTES]
