"""Who may speak in a cluster over the network: whoever has its CURVE pair. Made once per cluster, handed on through
pipes, never written.

One pair serves all of a cluster: servers prove that they have it, clients are let in only with it, every byte between
is encrypted under keys of the connection's own. Sockets of one host need none: their files lie in a folder that only
their owner can enter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq
from zmq.auth.thread import ThreadAuthenticator

#: Of the transport's questions (ZAP): one for all that is guarded here.
_DOMAIN = "zoo"


@dataclass(frozen=True, slots=True)
class Keys:
    """A CURVE pair in Z85, 40 characters each. The secret shows in no repr."""

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
        """Before it binds: let in only who has the pair. Its context needs a `Authenticator`."""
        socket.curve_server = True
        socket.curve_secretkey = self.secret.encode()
        socket.zap_domain = _DOMAIN.encode()
        socket.setsockopt(
            zmq.ZAP_ENFORCE_DOMAIN, 1
        )  # without a doorkeeper nobody comes in; else everybody would who knows the public key

    def introduce(self, socket: zmq.Socket[bytes]) -> None:
        """Before it connects."""
        socket.curve_serverkey = socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()


class Authenticator:
    """Answers the transport's questions who may come in, for all sockets of a context, in a thread of its own, until
    `close`.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._public = keys.public
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Of zmq.auth. `key`: in Z85. Keys that were asked for are public ones: a comparison has nothing to give
        away.
        """
        return key.decode("ascii", "replace") == self._public

    def close(self) -> None:
        self._authenticator.stop()
