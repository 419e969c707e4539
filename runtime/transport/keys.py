"""Authenticate the peers of a cluster over the network with one CURVE key pair.

The pair is made once per cluster and passed on through pipes, never written to disk. Servers prove that they have it,
clients are admitted only with it, and all traffic is encrypted with keys of the connection. Sockets on one host need no
keys: their files lie in a folder that only their owner can enter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq
from zmq.auth.thread import ThreadAuthenticator

#: ZAP domain of all sockets that are guarded here.
_DOMAIN = "zoo"


@dataclass(frozen=True, slots=True)
class Keys:
    """Hold a CURVE key pair in Z85, 40 characters each. The secret does not appear in the repr."""

    public: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        if (
            len(self.public) != 40
            or len(self.secret) != 40
            or zmq.curve_public(self.secret.encode()) != self.public.encode()
        ):
            raise ValueError("these are not the two keys of one pair")

    @classmethod
    def make(cls) -> Keys:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Admit only clients with the pair; call it before the socket binds. Its context needs an `Authenticator`."""
        socket.curve_server = True
        socket.curve_secretkey = self.secret.encode()
        socket.zap_domain = _DOMAIN.encode()
        socket.setsockopt(
            zmq.ZAP_ENFORCE_DOMAIN, 1
        )  # without an authenticator all clients are refused, instead of all that have the public key being admitted

    def introduce(self, socket: zmq.Socket[bytes]) -> None:
        """Use the pair for an outgoing connection; call it before the socket connects."""
        socket.curve_serverkey = socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()


class Authenticator:
    """Answer ZAP requests for all sockets of a context, in a thread of its own, until `close`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._public = keys.public
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client's public key (Z85) is the cluster's; called by zmq.auth.

        The keys are public, so a plain comparison leaks nothing.
        """
        return key.decode("ascii", "replace") == self._public

    def close(self) -> None:
        self._authenticator.stop()
